"""A comparison as one self-contained HTML page with inline SVG."""

from apex.tools.report.document import report

__all__ = ["report"]
