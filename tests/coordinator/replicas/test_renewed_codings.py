"""The coding of a stage's parts follows the line and the size of its last part, not only the first estimate."""

from collections.abc import Sequence
from functools import partial

from ravnest.net.probe.measuring import LinkSpeed
from ravnest.state.codings import EXACT, INT8, LOSSLESS
from tests.swarms.scripted import Play, Provider, Run


def all_have(coding: str, providers: Sequence[Provider]) -> bool:
    return all(each.codings[-1:] == [coding] for each in providers)


def test_owners_are_told_when_the_size_of_the_last_part_or_the_line_asks_for_another_coding(
    play: Play, often: None
) -> None:
    async def scene(run: Run) -> None:
        for name in "ab":
            run.swarm.join(name)
        await run.deploy(2)
        providers = [run.swarm.providers[name] for name in "ab"]
        # The lines are not measured.
        await run.until(partial(all_have, LOSSLESS, providers))
        # Within the share of the line, the 100 bytes of a simulated part take 0.1 s, 40 s and 400 s.
        for total, rate, coding in ((10, 7e3, EXACT), (20, 17.0, LOSSLESS), (30, 1.7, INT8)):
            for each in providers:
                each.member.link.speed = LinkSpeed(0.02, rate, rate)
            await run.feed(total)
            await run.until(partial(all_have, coding, providers))
        assert [each.codings for each in providers] == [[LOSSLESS, EXACT, LOSSLESS, INT8]] * 2

    play(scene)
