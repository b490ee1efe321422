"""The types of a run's settings, and how one of them is declared."""

from typing import Annotated, Any

from pydantic import AllowInfNan, BeforeValidator, Field, Strict


def _whole_to_int(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Strict: "3" is no number and 1 is not yes. Only 3.0 for 3, which TOML and JSON writers produce, is taken.
Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Whole = Annotated[int, BeforeValidator(_whole_to_int), Strict()]
Number = Annotated[float, Strict(), AllowInfNan(False)]


def setting(default: Any, panel: str, text: str, **limits: Any) -> Any:
    """A setting with its panel of the help page and its description.

    `before` among the limits is the value that runs had before there was the setting, where that is not the default.
    """
    extra = {"panel": panel} | ({"before": limits.pop("before")} if "before" in limits else {})
    return Field(default=default, description=text, json_schema_extra=extra, **limits)
