"""torch's paged kernel on a GPU against the naive backend."""

from __future__ import annotations

import pytest
import torch

from services.llm.attention import CudaBackend, GatheredBackend, NaiveBackend, cuda
from services.llm.attention.plan import GroupPlan
from tests.llm import varlen
from tests.llm.attention_steps import random_step

pytestmark = pytest.mark.skipif(
    cuda.unusable("cuda:0" if torch.cuda.is_available() else "cpu") is not None, reason="needs CUDA with FlashAttention"
)

STEPS = {
    "decodes": ([1, 255, 256, 300, 1700], []),
    "chunks": ([], [(0, 700), (512, 40), (250, 20)]),
    "mixed": ([900, 3], [(0, 130), (600, 64), (256, 1)]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 64), ((12, 2), 128), ((8, 1), 256), ((4, 2), 8)])
@pytest.mark.parametrize("kind", STEPS)
def test_the_kernel_equals_the_naive_backend(
    kind: str, heads: tuple[int, int], head_dim: int, window: int | None, dtype: torch.dtype
) -> None:
    step = random_step(*STEPS[kind], heads=heads, head_dim=head_dim, window=window, block_size=256, dtype=dtype, device="cuda")
    assert cuda.refusal(step.layer, dtype, 256) is None
    got = step.attend(CudaBackend())
    assert bool(torch.isfinite(got).all())
    torch.testing.assert_close(got, step.attend(NaiveBackend()), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", STEPS)
def test_blocks_that_a_step_does_not_own_are_not_read(kind: str) -> None:
    step = random_step(*STEPS[kind], head_dim=64, window=300, block_size=256, dtype=torch.bfloat16, device="cuda", spoil=True)
    got = step.attend(CudaBackend())
    torch.testing.assert_close(got, step.attend(NaiveBackend()), atol=2e-2, rtol=2e-2)


def test_the_kernel_does_what_the_tests_on_a_cpu_assume(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = random_step(*STEPS["mixed"], head_dim=64, block_size=256, dtype=torch.bfloat16, device="cuda")
    got = on_gpu.attend(CudaBackend()).cpu()

    def emulated(*arguments: object, **options: object) -> torch.Tensor:
        def down(value: object) -> object:
            return value.cpu() if isinstance(value, torch.Tensor) else value

        return varlen.varlen_attn(*map(down, arguments), **{k: down(v) for k, v in options.items()})  # type: ignore[arg-type]

    monkeypatch.setattr(cuda, "varlen_attn", emulated)
    torch.testing.assert_close(got, on_gpu.attend(CudaBackend()), atol=2e-2, rtol=2e-2)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """One split: bitwise the same values whoever else is in the step."""
    step = random_step([900, 1700, 300], [], head_dim=128, block_size=256, dtype=torch.bfloat16, device="cuda")
    together = step.attend(CudaBackend())
    alone = GroupPlan(
        None, step.group.slots[:1], 1, step.group.decode_blocks[:1], step.group.decode_first[:1], step.group.decode_end[:1], []
    )
    got = CudaBackend().attend(
        step.pool, step.layer, alone, step.query[:, :1], step.key[:, :1], step.value[:, :1], 128**-0.5, None
    )
    assert torch.equal(got[0], together[0])


@pytest.mark.parametrize("window", [None, 9])
def test_the_gathered_path_on_a_gpu_in_float32(window: int | None) -> None:
    step = random_step([12, 1, 33], [(0, 9), (6, 7), (40, 2)], heads=(6, 2), window=window, device="cuda")
    torch.testing.assert_close(step.attend(CudaBackend()), step.attend(NaiveBackend()), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step.attend(GatheredBackend()), step.attend(NaiveBackend()), atol=1e-4, rtol=1e-4)
