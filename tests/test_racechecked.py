"""What racecheck's report is read as: `make sanitize` itself needs a GPU."""

from __future__ import annotations

from racechecked import handed_over, hazards, unexplained

EDGE = "=========\n"


def access(kind: str, kernel: str, place: tuple[str, str] | None = None) -> str:
    there = "" if place is None else f" in {place[0]}:{place[1]}"
    return f"{kind} access at {kernel}+0x1f0{there}"


def block(first: str, *others: str) -> str:
    lines = [f"========= Error: Race reported between {first}", *(f"=========     and {o} [8 hazards]" for o in others)]
    return "\n".join(lines) + "\n" + EDGE


def state() -> list[tuple[str, str]]:
    places = sorted(handed_over())
    assert {kernel for kernel, _, _ in places} == {"matmul_many", "hadamard_wide_hopper"}
    places = [place for place in places if place[0] == "matmul_many"]
    assert len(places) == 2
    assert {file for _, file, _ in places} == {"matmul_many.py"}
    return [(file, line) for _, file, line in places]


def test_known_hazards_are_left_out() -> None:
    first, second = state()
    text = block(access("Read", "matmul_many", first), access("Write", "matmul_many", second))
    text += block(access("Read", "nvjet_sm90_x"), access("Write", "nvjet_sm90_x"))
    assert len(hazards(EDGE + text)) == 2
    assert unexplained(EDGE + text) == []


def test_others_are_not() -> None:
    first, _ = state()
    other = ("matmul_many.py", "1")
    for text in (
        block(access("Read", "matmul_many", first), access("Write", "matmul_many", other)),
        block(access("Write", "matmul_few", first), access("Write", "matmul_few", first)),
        block(access("Read", "matmul_many"), access("Write", "matmul_many")),
        "========= Error: Race reported in words that nobody knows\n",
    ):
        assert [h.text for h in unexplained(EDGE + text)] == [h.text for h in hazards(EDGE + text)] != []
