"""A comparison as one self-contained page: no network, no library, inline SVG."""

from apex.tools.report.document import report

__all__ = ["report"]
