"""What `coinrag check` found, for a reader."""

import json

from launch.commands import Result

_MARKS = ("‹", "›")
_COLOURS = ("\x1b[32m‹", "›\x1b[0m")


def render_check(result: Result, *, colours: bool = False) -> str:
    """A result of `check` for a reader; what is learned is marked, and green with `colours`."""
    marks = _COLOURS if colours else _MARKS
    lines = [line for sample in result["samples"] for line in _sample_lines(sample, marks)]
    counts = result["counts"]
    lines.append(f"{counts['samples']:,} samples, {counts['answer_tokens']:,} answer tokens")
    for part, spread in counts["tokens"].items():
        lines.append(
            f"  {part}: {spread['median']:,} tokens at the median, {spread['p99']:,} at the 99th "
            f"percentile, {spread['max']:,} at most"
        )
    if counts["shortened"]:
        lines.append(
            f"  {counts['shortened']:,} samples lose {counts['dropped']:,} nuggets or chunks to "
            "train.max_length_tokens"
        )
    if counts["without_passages"]:
        lines.append(
            f"  warning: {counts['without_passages']:,} of them lose all, and are learned without "
            "any passage: raise train.max_length_tokens"
        )
    lines.append(
        f"{counts['steps']:,} steps of at most {counts['passes_a_rank_and_step']} passes a rank, "
        f"{counts['tokens_of_the_run']:,} packed tokens; the longest pass has "
        f"{counts['tokens_of_the_longest_pass']:,}"
    )
    lines += _memory_lines(result["memory"])
    time = result["time"]
    lines.append(
        f"time: {time['hours']:.3g} hours, from {time['source']}; {time['flops']:.3g} operations"
    )
    if "teacher" in result:
        lines.append(_teacher_line(result["teacher"]))
    disk = result["disk"]
    lines.append(f"disk: {_parts(disk['parts'])}")
    lines.append(
        f"  {_size(disk['gib'])}, {_size(disk['free_gib'])} free: {_verdict(disk['fits'])}"
    )
    return "\n".join(lines)


def _sample_lines(sample: Result, marks: tuple[str, str]) -> list[str]:
    left_out = f", {sample['dropped']} nuggets or chunks left out" if sample["dropped"] else ""
    lines = [f"question {sample['question_id']} of {sample['dataset']}{left_out}"]
    for form in sample["forms"]:
        for piece in form["slices"]:
            name = f"{piece['title']} ({piece['chunk'][:12]})" if piece["title"] else piece["chunk"]
            lines.append(
                f"  {name} [{piece['start']}, {piece['end']}) at {piece['position']}: "
                f"{_quoted(piece['text'])}"
            )
        lines.append(f"  query of {form['query_tokens']} tokens: {_quoted(form['query'])}")
        if form["learned"] is None:
            lines.append("  learned: the teacher's answer, which the training asks for first")
            continue
        start, end = marks
        learned = "".join(f"{start}{_quoted(token)[1:-1]}{end}" for token in form["learned"])
        lines.append(f"  learned, {len(form['learned'])} tokens: {learned}")
    return [*lines, ""]


def _memory_lines(memory: Result) -> list[str]:
    lines = [f"memory a rank, estimated: {_parts(memory['parts'])}"]
    if memory["host_parts"]:
        lines.append(f"  in the host's memory: {_parts(memory['host_parts'])}")
    lines.append(
        f"  {_size(memory['gib'])}, {_size(memory['available_gib'])} for each on "
        f"{memory['available_on']}: {_verdict(memory['fits'])}"
    )
    for change in memory["changes"]:
        fits = "fits" if change["fits"] else "still too much"
        lines.append(f"  {change['change']}: {_size(change['gib'])}, {fits}")
    return lines


def _teacher_line(teacher: Result) -> str:
    if not teacher["tokens"]:
        return "teacher: has been asked before"
    return (
        f"teacher: reads {teacher['tokens']:,} tokens before the first step, roughly "
        f"{teacher['hours']:.3g} hours more; {_size(teacher['gib'])} a rank, keeps "
        f"{_size(teacher['disk_gib'])} in data.built_root, {_size(teacher['free_gib'])} free: "
        f"{_verdict(teacher['fits'])}"
    )


def _parts(parts: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {_size(gib)}" for name, gib in parts.items())


def _size(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.3g} MiB"


def _verdict(fits: bool) -> str:
    return "fits" if fits else "DOES NOT FIT"


def _quoted(text: str) -> str:
    # Line ends show as \n, and other scripts as they are.
    return json.dumps(text, ensure_ascii=False)
