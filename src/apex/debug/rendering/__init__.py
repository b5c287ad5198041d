"""The output formats of an explanation: terminal text, Markdown and HTML."""
