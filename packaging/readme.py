"""A plugin of hatchling: the description of the wheel is README.md with absolute links.

In the repository they are relative, so that they work in a clone and on any host.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"^(\[[^\]]+\]: )(?!https?:)(.+)$", re.MULTILINE)
"""Matches a definition such as ``[fix]: docs/fix_script.md``."""


def absolute(text: str, repository: str) -> str:
    """Returns the text with links to the files of a repository, and to pictures themselves."""

    def link(match: re.Match[str]) -> str:
        label, path = match.groups()
        view = "raw" if path.endswith((".png", ".svg")) else "blob"
        return f"{label}{repository}/{view}/main/{path}"

    return LINK.sub(link, text)


class Readme(MetadataHookInterface):
    """Sets the project's description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Reads README.md; ``[project.urls]`` names the repository."""
        text = Path(self.root, "README.md").read_text("utf-8")
        text = absolute(text, metadata["urls"]["Repository"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
