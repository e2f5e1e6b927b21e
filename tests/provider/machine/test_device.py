"""The device that a provider computes on: the best one for `auto`, and a clear reason when one is missing."""

import re

import pytest
import torch

from ravnest.errors import PeerError
from ravnest.provider.machine.device import choose_device


def test_a_device_that_is_not_here_says_what_to_use() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cpu:0") == torch.device("cpu")
    for wanted in ("cuda:77", "toaster", "meta"):
        with pytest.raises(PeerError, match=r"cannot be used here .*; use --device cpu or --device auto"):
            choose_device(wanted)


@pytest.mark.parametrize(
    ("cuda", "mps", "chosen"), [(True, True, "cuda:0"), (False, True, "mps"), (False, False, "cpu")]
)
def test_auto_takes_the_best_there_is(cuda: bool, mps: bool, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert choose_device("auto") == torch.device(chosen)


@pytest.mark.parametrize(
    ("count", "built_for", "wanted", "words"),
    [
        (0, None, "cuda", "this PyTorch build has no GPU support"),
        (0, "12.8", "cuda", "there is no GPU that PyTorch can use; check the driver"),
        (1, "12.8", "cuda:1", "there is one GPU here, cuda:0"),
        (4, "12.8", "cuda:4", "there are cuda:0 to cuda:3"),
        (0, None, "mps", "there is no Apple GPU"),
        (0, None, "meta", "a provider computes on cpu, cuda:N or mps"),
    ],
)
def test_a_missing_device_is_told_apart_from_a_missing_driver(
    count: int, built_for: str | None, wanted: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PeerError, match=re.escape(words)):
        choose_device(wanted)
