"""A provider whose memory is nearly exhausted asks for less before it stops, and for no less than it must."""

from ravnest.provider.machine.memory_pressure import (
    EASY_SECONDS,
    SETTLE_SECONDS,
    MemoryReading,
    MemoryStrain,
    ReliefStep,
)

GIB = 1 << 30
ENOUGH = MemoryReading(2 * GIB, 2 * GIB, 8 * GIB)
SHORT = MemoryReading(4 * GIB, 200 << 20, 8 * GIB)
EXHAUSTED = MemoryReading(4 * GIB, 20 << 20, 8 * GIB)


def steps(
    strain: MemoryStrain, reading: MemoryReading, flying: int, seconds: int, begin: float = 0.0
) -> list[ReliefStep]:
    """Looks every half second at a stage that follows what it asked for."""
    found = []
    for tick in range(2 * seconds):
        step = strain.look(reading, flying, begin + tick / 2)
        if step is not None:
            found.append(step)
            flying = min(flying, step.in_flight) if step.kind == "fewer" else flying
    return found


def test_with_enough_memory_nothing_is_asked_for() -> None:
    assert steps(MemoryStrain(False), ENOUGH, 8, 100) == []


def test_fewer_in_flight_come_first_then_recomputing_and_it_goes_on_as_long_as_there_is_something_left() -> None:
    found = steps(MemoryStrain(False), SHORT, 6, 60)
    assert [step.kind for step in found] == ["fewer"] * 4 + ["recompute"]
    assert [step.in_flight for step in found[:4]] == [4, 3, 2, 1]
    assert "4 GiB of 8 GiB" in found[0].reason and "200 MiB are left" in found[0].reason


def test_what_is_exhausted_after_all_steps_ends_in_a_clear_stop_that_says_how_much_is_needed() -> None:
    found = steps(MemoryStrain(False), EXHAUSTED, 2, 10)
    assert [step.kind for step in found[:3]] == ["fewer", "recompute", "stop"]
    # A thirtieth of what is lent is short here: 273 MiB, of which 20 are left.
    assert "at least 253 MiB more are needed" in found[2].reason and "--memory" in found[2].reason


def test_a_stage_that_recomputes_already_has_one_step_less() -> None:
    assert [step.kind for step in steps(MemoryStrain(True), EXHAUSTED, 2, 5)][:2] == ["fewer", "stop"]


def test_a_moment_without_memory_stops_no_stage() -> None:
    strain = MemoryStrain(True)
    assert strain.look(EXHAUSTED, 1, 0.0) is None
    assert strain.look(ENOUGH, 1, 1.0) is None
    assert strain.look(EXHAUSTED, 1, SETTLE_SECONDS) is None
    assert strain.look(SHORT, 1, SETTLE_SECONDS + 1) is None
    assert strain.look(EXHAUSTED, 1, SETTLE_SECONDS + 2) is None
    found = strain.look(EXHAUSTED, 1, 2 * SETTLE_SECONDS + 2)
    assert found is not None and found.kind == "stop"


def test_each_step_has_time_to_show() -> None:
    strain = MemoryStrain(False)
    assert strain.look(SHORT, 8, 0.0) is not None
    assert strain.look(SHORT, 8, SETTLE_SECONDS - 0.1) is None
    assert strain.look(SHORT, 8, SETTLE_SECONDS) is not None


def test_a_bound_is_lifted_only_after_a_long_time_of_plenty_and_later_each_time() -> None:
    strain = MemoryStrain(False)
    assert steps(strain, SHORT, 4, 1)[0].kind == "fewer"
    # More than is short, and not yet plenty.
    between = MemoryReading(4 * GIB, 450 << 20, 8 * GIB)
    assert steps(strain, between, 3, 200, begin=10) == []
    assert steps(strain, ENOUGH, 3, int(EASY_SECONDS) - 1, begin=300) == []
    assert [step.kind for step in steps(strain, ENOUGH, 3, 2, begin=300 + EASY_SECONDS - 1)] == ["eased"]
    assert steps(strain, SHORT, 4, 1, begin=500)[0].kind == "fewer"
    assert steps(strain, ENOUGH, 3, int(2 * EASY_SECONDS) - 1, begin=600) == []
    assert [s.kind for s in steps(strain, ENOUGH, 3, 2, begin=599 + 2 * EASY_SECONDS)] == ["eased"]


def test_what_the_owner_does_not_lend_counts_as_gone() -> None:
    reading = MemoryReading(used_bytes=int(7.9 * GIB), free_bytes=50 * GIB, lent_bytes=8 * GIB)
    assert [step.kind for step in steps(MemoryStrain(False), reading, 2, 1)] == ["fewer"]


def test_what_the_process_takes_besides_its_stage_is_not_held_against_it() -> None:
    reading = MemoryReading(220 << 20, 50 * GIB, lent_bytes=100 << 20, process_bytes=256 << 20)
    assert steps(MemoryStrain(False), reading, 4, 20) == []
