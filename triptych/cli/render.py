"""Figures as text, for people."""

from dataclasses import asdict

from triptych.reports import PromptTokens, StageTimes, Usage

_BAR = 40
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def prompt_tokens(tokens: PromptTokens) -> str:
    """Such as `57 tokens (21 text, 36 image)`."""
    counts = asdict(tokens)
    cached = counts.pop("cached")
    shown = ", ".join(f"{count} {modality}" for modality, count in counts.items() if count)
    return f"{tokens.total} tokens ({shown or 'empty'}{f'; {cached} cached' if cached else ''})"


def usage_line(usage: Usage, seconds: float) -> str:
    """Such as `prompt 57 tokens (21 text, 36 image), answer 3 tokens, 0.12 s`."""
    prompt = prompt_tokens(usage.prompt_tokens_details)
    return f"prompt {prompt}, answer {usage.completion_tokens} tokens, {seconds:.2f} s"


def timing_lines(stages: StageTimes) -> list[str]:
    """One bar per stage that happened, the longest one as wide as a bar gets, with milliseconds."""
    times = {name.replace("_", " "): seconds for name, seconds in asdict(stages).items() if seconds is not None}
    longest = max(times.values(), default=0.0) or 1.0
    return [f"{name:<13} {_bar(seconds / longest):<{_BAR}} {seconds * 1e3:9.1f} ms" for name, seconds in times.items()]


def _bar(share: float) -> str:
    whole, eighths = divmod(round(share * _BAR * 8), 8)
    return ("█" * whole + _EIGHTHS[eighths]).rstrip()
