"""A provider's process stays small. Both settings are for a whole process, so each test has one of its own."""

import subprocess
import sys

import pytest

_OPTIMIZERS = "SGD Adam AdamW NAdam RAdam Adamax Adadelta Adagrad ASGD RMSprop Rprop Adafactor Muon".split()


def python(code: str) -> str:
    """The output of a new process."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_optimizers_work_without_the_compiler_and_it_is_there_for_who_asks() -> None:
    shown = python(f"""
import sys, torch
from ravnest.provider.machine.torch_footprint import leave_out_the_compiler
leave_out_the_compiler()
for name in {_OPTIMIZERS!r}:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = getattr(torch.optim, name)([parameter], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.sum().backward()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    assert not torch.equal(parameter, torch.ones(4, 4)), name
print(any(name.startswith("torch._dynamo.") for name in sys.modules))
import torch._dynamo.config
print(torch._dynamo.config.__name__, torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
""")
    assert shown.split() == ["False", "torch._dynamo.config", "2.0"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other allocators")
def test_freed_tensors_go_back_to_the_system() -> None:
    shown = python("""
import torch
from ravnest.provider.machine.torch_footprint import give_memory_back
from ravnest.provider.machine.memory import resident_bytes
give_memory_back()
kept = []
for _ in range(3):
    # Every other tensor stays: what is freed between them is what an allocator likes to keep.
    made = [torch.ones(5 << 18) for _ in range(40)]
    kept.append(made[::2])
    full = resident_bytes()
    del made
    freed = full - resident_bytes()
print(freed >> 20)
""")
    assert int(shown) >= 80
