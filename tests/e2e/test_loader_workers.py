"""Data from a loader with worker processes: they are forked out of a process that holds the swarm's connections."""

from pathlib import Path

from torch.utils.data import DataLoader, TensorDataset

from ravnest.coordinator.launch.embedded import EmbeddedSwarm
from tests.e2e.jobs import a_job, samples


def test_a_loader_with_workers_feeds_every_sample(swarm: EmbeddedSwarm, tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*samples(64)), batch_size=8, shuffle=True, num_workers=2)
    job = a_job(loader, eval_data=loader, epochs=8)
    summary = swarm.train(job, providers=2, run=tmp_path / "run", display=False).summary
    assert (summary.status, summary.samples, summary.ledger.lost) == ("finished", 512, 0)
