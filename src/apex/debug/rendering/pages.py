"""Pages from Jinja templates; in HTML, every value is escaped."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def render(package: str, template: str, **values: object) -> str:
    """Returns the page rendered from a template.

    Args:
        package: The package whose folder ``page`` holds the template.
        template: File name of the template.
        values: Names that the template uses; a missing one raises ``jinja2.UndefinedError``.
    """
    environment = Environment(
        loader=PackageLoader(package, "page"),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(values)
