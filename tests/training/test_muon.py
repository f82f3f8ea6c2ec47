"""The stacked optimiser against torch's own, and against the definition of what it approximates."""

import copy

import torch

from training.muon import StackedMuon, orthogonal


def test_steps_as_torch_does() -> None:
    torch.manual_seed(0)
    shapes = [(24, 24), (24, 24), (48, 16), (16, 48), (48, 16)]
    mine = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    theirs = copy.deepcopy(mine)
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    optimizers = StackedMuon(mine, **options), torch.optim.Muon(theirs, **options)
    for _ in range(4):
        for a, b in zip(mine, theirs, strict=True):
            b.grad = torch.randn_like(b)
            a.grad = b.grad.clone()
        mine[1].grad = theirs[1].grad = None  # a matrix without a gradient stays as it is
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=2e-3, rtol=0)  # a step is 0.02 * 0.2 * 7; bfloat16 inside


def test_keeps_singular_vectors_and_evens_out_singular_values() -> None:
    torch.manual_seed(1)
    u, _ = torch.linalg.qr(torch.randn(3, 20, 20))
    v, _ = torch.linalg.qr(torch.randn(3, 32, 20))
    values = torch.logspace(0, -1, 20)
    got = orthogonal(u * values @ v.transpose(1, 2), (3.4445, -4.7750, 2.0315), 5).float()
    inner = u.transpose(1, 2) @ got @ v
    diagonal = inner.diagonal(dim1=1, dim2=2)
    assert ((diagonal > 0.6) & (diagonal < 1.3)).all()
    assert (inner - torch.diag_embed(diagonal)).abs().max() < 0.06
