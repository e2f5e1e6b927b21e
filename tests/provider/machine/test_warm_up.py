"""A standby has imported everything that a first backward makes torch import."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
from ravnest.provider.machine.torch_footprint import leave_out_the_compiler
from ravnest.provider.machine.warm_up import warm_up

leave_out_the_compiler()
warm_up()
before = set(sys.modules)
inputs = torch.ones(2, 3, requires_grad=True)
layer = torch.nn.Linear(3, 4)
torch.autograd.grad([layer(inputs)], [inputs, *layer.parameters()], [torch.ones(2, 4)])
torch.optim.SGD(layer.parameters(), lr=0.1)
print(*sorted(set(sys.modules) - before))
"""


def test_the_first_backward_of_one_that_stood_by_imports_nothing_more() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert [name for name in done.stdout.split() if name != "torch.optim.sgd"] == []
