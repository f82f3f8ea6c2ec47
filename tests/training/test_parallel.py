"""Two processes train as one: the mean of their gradients, one clock, equal weights, clips of their own."""

import os
import socket
from pathlib import Path

import torch

from training.common import descend
from training.parallel import Ranks


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def one_of_two(rank: int, address: int, folder: str) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(address), LOCAL_RANK="0"
    )
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    ranks = Ranks()
    torch.manual_seed(5)
    weight = torch.nn.Parameter(torch.full((3,), float(rank)))
    ranks.start([weight])
    begun = weight.detach().clone()
    noise = torch.rand(4)
    data = torch.tensor([1.0, 2.0, 4.0]) * (rank + 1)
    descend((weight * data).sum(), [weight], [torch.optim.SGD([weight], lr=0.1)], ranks)
    found = {
        "begun": begun,
        "ended": weight.detach(),
        "noise": noise,
        "share": ranks.share_of(9),
        "agreed": ranks.agree(10.0 * rank),
        "first": ranks.first,
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    ranks.stop()


def test_two_processes_take_one_step_together(tmp_path):
    torch.multiprocessing.spawn(one_of_two, args=(port(), str(tmp_path)), nprocs=2)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    # Mean gradient 1.5 * (1, 2, 4), of norm 1.5 * sqrt(21), clipped to norm 1.
    step = torch.tensor([1.0, 2.0, 4.0]) / 21**0.5
    for one in found:
        assert one["begun"].tolist() == [0.0, 0.0, 0.0]  # rank 0's weights
        torch.testing.assert_close(one["ended"], -0.1 * step, atol=1e-6, rtol=1e-5)
        assert one["share"] == 4 and one["agreed"] == 5.0
    assert [one["first"] for one in found] == [True, False]
    assert not torch.equal(found[0]["noise"], found[1]["noise"])


def test_alone_there_is_nothing_to_share(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    ranks = Ranks()
    ranks.start([torch.zeros(1)])
    gradient = torch.ones(2)
    ranks.average([gradient])
    assert ranks.first and ranks.share_of(9) == 9 and ranks.agree(3.5) == 3.5
    assert gradient.tolist() == [1.0, 1.0]
