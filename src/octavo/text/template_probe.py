"""Renderings that show what a chat template does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateError

from octavo.text.template_sandbox import EXPRESSION_ERRORS, SandboxedTemplate

_TIME_LIMIT_S = 5.0  # a thousand times as long as it takes: what is found must not depend on how busy the machine is
# A function as clients state it.
TOOL = {
    "type": "function",
    "function": {
        "name": "octavo_tool",
        "description": "octavo describes",
        "parameters": {
            "type": "object",
            "properties": {"octavo_parameter": {"type": "string", "description": "octavo describes"}},
            "required": ["octavo_parameter"],
        },
    },
}


def probe(template: SandboxedTemplate, variables: Mapping[str, Any]) -> str | None:
    """What the template makes of ``variables``, or None where it fails or refuses.

    Some have no prompt without tools, or without variables of their own: these are given "" then. Raises
    ``RenderLimit`` for a template that does not end.
    """
    more: dict[str, Any]
    for more in ({"tools": None}, {"tools": [TOOL]}, {**dict.fromkeys(template.variables, ""), "tools": [TOOL]}):
        try:
            return template.render({**more, **variables}, time_limit_s=_TIME_LIMIT_S, num_input_chars=0)
        except (TemplateError, *EXPRESSION_ERRORS):
            continue
    return None
