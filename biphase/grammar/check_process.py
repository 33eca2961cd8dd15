"""`python -m biphase.grammar.check_process`: compiles grammars that come on its input, and says whether they are good.

One frame in, one frame out (`pipe`): the first is a packed vocabulary, each further one a StructuredOutput as JSON,
answered by {"error": text or null}. A grammar that takes more processor time or memory than its limits takes the
process with it, by the system's own hand, whatever the code is doing; whoever reads the answers sees the end then.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys

from biphase.errors import BiphaseError
from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.limits import COMPILE_BYTES
from biphase.grammar.pipe import framed, read_frame
from biphase.grammar.vocabulary import Vocabulary, longest_match_encoder
from biphase.request import StructuredOutput


def main() -> int:
    compile_seconds = float(sys.argv[1])
    # Others' tokens come first.
    os.nice(5)
    # A crash here is an answer; nobody wants its core.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (COMPILE_BYTES, COMPILE_BYTES))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    packed = read_frame(requests)
    if packed is None:
        return 0
    vocabulary = Vocabulary.unpack(packed)
    compiler = GrammarCompiler(vocabulary, longest_match_encoder(vocabulary.tokens, vocabulary.special_ids))
    while (request := read_frame(requests)) is not None:
        asked = StructuredOutput(**json.loads(request))
        error = None
        # Counts the process's own time; SIGPROF, which nobody handles, ends it.
        signal.setitimer(signal.ITIMER_PROF, compile_seconds)
        try:
            compiler.probe(asked)
        except BiphaseError as refusal:
            error = refusal.message
        except MemoryError:
            error = f"Invalid {asked.kind}: too complex: it takes too much memory."
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        answers.write(framed(json.dumps({"error": error}).encode()))
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
