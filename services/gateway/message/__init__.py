"""What the text of an answer says: content, reasoning, tool calls. Pure, fed with text as it comes.

A model writes its calls and its reasoning into its text, in its family's own format. This room knows the formats: how
to ask for them (grammar, prompt) and how to read them while they stream.
"""
