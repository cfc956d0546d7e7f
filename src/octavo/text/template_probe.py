"""Renderings that show what a chat template does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.meta import find_undeclared_variables

from octavo.text.template_budget import RenderLimit
from octavo.text.template_sandbox import EXPRESSION_ERRORS, SandboxedTemplate

_TIME_LIMIT_S = 1.0
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

    Some have no prompt without tools, or without variables of their own: these are given "" then.
    """
    others = dict.fromkeys(find_undeclared_variables(template.tree), "")
    for more in ({"tools": None}, {"tools": [TOOL]}, {**others, "tools": [TOOL]}):
        try:
            return template.render({**more, **variables}, time_limit_s=_TIME_LIMIT_S, num_input_chars=0)
        except RenderLimit:
            break
        except (TemplateError, *EXPRESSION_ERRORS):
            continue
    return None
