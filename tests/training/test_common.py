"""Weights survive being saved in parts, and an incomplete set is noticed."""

import pytest
import torch

from training import common


def test_parts_hold_all_weights_and_each_is_small(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "PART_BYTES", 3000)
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(30, 30) for _ in range(4)))
    common.save_half(module, tmp_path, "net")
    files = sorted(tmp_path.iterdir())
    # Each layer's weight is 1,800 bytes and its bias 60: one layer and the next bias fit, two layers do not.
    assert [file.name for file in files] == [f"net.{i}.safetensors" for i in range(4)]
    loaded = common.load_half(tmp_path, "net")
    for key, value in module.state_dict().items():
        assert torch.equal(loaded[key], value.half().float())
    other = tmp_path / "other"
    common.save_half(module, other, "net")
    (other / "net.2.safetensors").replace(files[2])
    with pytest.raises(ValueError, match="another save"):
        common.load_half(tmp_path, "net")
    common.save_half(module, tmp_path, "net")
    before = {file: file.read_bytes() for file in files}
    # A write that fails half-way, here for a name that is a folder, leaves the set as it was.
    files[-1].unlink()
    files[-1].mkdir()
    with pytest.raises(ValueError, match="it is a folder"):
        common.save_half(module, tmp_path, "net")
    assert sorted(tmp_path.iterdir()) == [*files, other]
    assert all(file.read_bytes() == before[file] for file in files[:-1])
    files[-1].rmdir()
    with pytest.raises(FileNotFoundError):
        common.load_half(tmp_path, "net")


def test_a_budget_without_a_step_is_an_error():
    with pytest.raises(SystemExit, match="no step ran"):
        list(common.Budget(1e-9).steps())


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), 3e38])
def test_a_step_whose_gradient_is_not_finite_changes_nothing(fault: float) -> None:
    # 3e38 is finite, and its square is not: the norm is where it shows.
    weights = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]
    loss = (weights[0] * torch.tensor([1.0, fault, 1.0])).sum() + weights[1].sum()
    common.descend(loss, weights, [torch.optim.SGD(weights, lr=0.1)])
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)


def test_a_step_is_clipped_to_unit_norm() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    norm = common.descend(
        (weight * torch.tensor([3.0, 4.0])).sum(), [weight], [torch.optim.SGD([weight], lr=1.0)]
    )
    assert float(norm) == pytest.approx(5.0)
    assert torch.allclose(weight.detach(), torch.tensor([-0.6, -0.8]), atol=1e-5)
