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
    files[-1].unlink()
    with pytest.raises(FileNotFoundError):
        common.load_half(tmp_path, "net")


def test_a_budget_without_a_step_is_an_error():
    with pytest.raises(SystemExit, match="no step ran"):
        list(common.Budget(1e-9).steps())
