"""Member process of `hivemind.Optimizer`, started with an interpreter that has hivemind.

Every member applies updates of its own and the parameters are averaged in the background, in 16 bits: the options for
slow lines in hivemind's guide.
"""

import os
import time
from functools import partial
from pathlib import Path

from benchmarks.homes_parts.models import BATCH
from benchmarks.homes_parts.peer_member import adamw, build, my_place, train

_LOOK_SECONDS = 0.1
_MATCHMAKING_SECONDS = 10.0


def main() -> None:
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    import hivemind  # type: ignore[import-not-found,unused-ignore]
    from hivemind.compression import Float16Compression  # type: ignore[import-not-found,unused-ignore]

    place = my_place()
    options = {"host_maddrs": [f"/ip4/{place.host}/tcp/0"], "start": True, "use_relay": False, "auto_nat": False}
    meeting = Path(place.folder, "first")
    if place.index == 0:
        dht = hivemind.DHT(**options)
        unfinished = meeting.with_suffix(".new")
        unfinished.write_text(str(dht.get_visible_maddrs()[0]))
        unfinished.rename(meeting)
    else:
        # The members have no connection before this one: the file is their only notification.
        while not meeting.exists():
            time.sleep(_LOOK_SECONDS)
        dht = hivemind.DHT(initial_peers=[meeting.read_text()], **options)
    model, parameters = build(place)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="homes",
        params=parameters,
        optimizer=partial(adamw, slower=place.slower),
        batch_size_per_step=BATCH,
        target_batch_size=place.inner_steps * place.count * BATCH,
        use_local_updates=True,
        matchmaking_time=_MATCHMAKING_SECONDS,
        averaging_timeout=place.averaging_seconds,
        state_averaging_compression=Float16Compression(),
    )

    train(place, model, optimizer.step, lambda: int(optimizer.local_epoch))


if __name__ == "__main__":
    main()
