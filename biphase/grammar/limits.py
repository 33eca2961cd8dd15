"""How large and how slow a grammar may be. The same in gateway and workers: what the one lets pass, the others run."""

from __future__ import annotations

# Characters of the whole specification: room for 40,000 choices or a schema of a thousand fields.
MAX_SPEC_CHARACTERS = 2**20
# Arrays and objects within each other in a JSON schema.
MAX_NESTING = 64
MAX_CHOICES = 65_536
# Processor time to compile one and to try it out.
COMPILE_SECONDS = 2.0
# Memory of a process that compiles, all in all.
COMPILE_BYTES = 2 * 2**30
# Processor time that the tokens allowed at one place may take. A usual grammar takes a hundredth of it.
MASK_SECONDS = 0.05

# The engine's own measures (llguidance.LLParserLimits): work and memory in each stage, counted, not timed.
PARSER_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 30_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 300_000,
}
