"""Tools as text: what the model is told of them, of its own calls and of what came of them.

The gateway's protocol has no tools, and few chat templates agree on them. So they are written as Qwen's and Hermes' models learnt
it, which others can read too; a call in an answer stays text.
"""

from __future__ import annotations

from services.gateway.http.values import Value

_BEFORE = """You can call these functions; each line between the tags describes one:
<tools>
"""
_AFTER = """
</tools>
To call one, write its name and arguments as JSON between these tags:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""


def describe(tools: Value) -> str:
    """What the system message says of them; nothing where there are none.

    Raises:
        ServiceError: INVALID_ARGUMENT about a path in the body.
    """
    lines = []
    for tool in tools.items():
        members = tool.members(("type", "function"))
        if "function" not in members or ("type" in members and members["type"].text() != "function"):
            raise tool.refuse("must be of type function, with a function")
        function = members["function"].members(("name", "description", "parameters", "strict"))
        if "name" not in function:
            raise members["function"].refuse("needs a name")
        function["name"].text()
        lines.append(Value(members["function"].json(), tool.path).text())
    return _BEFORE + "\n".join(lines) + _AFTER if lines else ""


def call_text(call: Value) -> str:
    """A call that the model made earlier, as it would have written it.

    Raises:
        ServiceError: INVALID_ARGUMENT about a path in the body.
    """
    members = call.members(("id", "type", "function", "index"))
    if "function" not in members:
        raise call.refuse("needs a function")
    function = members["function"].members(("name", "arguments"))
    if "name" not in function:
        raise members["function"].refuse("needs a name")
    name = Value(function["name"].text()).json()
    arguments = function["arguments"].text() if "arguments" in function else ""
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments or "{}"}}}\n</tool_call>'


def response_text(text: str) -> str:
    """What came of a call."""
    return f"<tool_response>\n{text}\n</tool_response>"
