"""The paged kernel against attention written out, on pools whose unused places hold NaN."""

from __future__ import annotations

import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.llm.native import paged_kernel
from services.llm.native.paged_kernel import PagedBatch, PagedKernel
from services.native import build

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
BLOCK = 8


@pytest.fixture(scope="module")
def kernel() -> PagedKernel:
    found = paged_kernel.load()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


@dataclass
class Case:
    """Sequences ``(context, new tokens)`` in shuffled blocks, with everything that no sequence holds set to NaN."""

    batch: PagedBatch
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    pool_keys: torch.Tensor
    pool_values: torch.Tensor
    shapes: list[tuple[int, int]]

    def new(self, which: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([rows[context:] for rows, (context, _) in zip(which, self.shapes, strict=True)])

    def place(self, sequence: int, position: int) -> tuple[int, int]:
        return int(self.batch.tables[sequence, position // BLOCK]), position % BLOCK


def make_case(dtype: torch.dtype, heads: int, kv_heads: int, width: int, shapes: list[tuple[int, int]], seed: int = 0) -> Case:
    random = torch.Generator().manual_seed(seed)
    counts = [count for _, count in shapes]
    columns = max((context + count + BLOCK - 1) // BLOCK for context, count in shapes)
    rows = len(shapes) + 2  # the blocks of two belong to nobody
    tables = torch.randperm(rows * columns, generator=random).to(torch.int32).view(rows, columns)[: len(shapes)].clone()
    batch = PagedBatch(
        torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        torch.tensor([sum(shape) for shape in shapes], dtype=torch.int32),
        tables,
    )
    keys, values = ([torch.randn(sum(shape), kv_heads, width, generator=random).to(dtype) for shape in shapes] for _ in range(2))
    pools = [torch.full((rows * columns, BLOCK, kv_heads, width), torch.nan, dtype=dtype) for _ in range(2)]
    query = torch.randn(sum(counts), heads, width, generator=random).to(dtype)
    case = Case(batch, query, keys, values, pools[0], pools[1], shapes)
    for i, (context, _) in enumerate(shapes):
        for position in range(context):
            at = case.place(i, position)
            case.pool_keys[at], case.pool_values[at] = keys[i][position], values[i][position]
    return case


def expected(case: Case, scale: float, window: int | None = None, softcap: float | None = None) -> torch.Tensor:
    """Attention written out in float64."""
    outs, at = [], 0
    for keys, values, (context, count) in zip(case.keys, case.values, case.shapes, strict=True):
        query = case.query[at : at + count].double().transpose(0, 1)  # [heads, count, width]
        group = len(query) // keys.shape[1]
        scores = query @ keys.double().permute(1, 2, 0).repeat_interleave(group, 0) * scale  # [heads, count, length]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        positions, queries = torch.arange(context + count), torch.arange(context, context + count)[:, None]
        visible = (positions <= queries) & (positions > queries - (window or context + count))
        weights = torch.softmax(scores.masked_fill(~visible, -torch.inf), -1)
        outs.append((weights @ values.double().transpose(0, 1).repeat_interleave(group, 0)).transpose(0, 1))
        at += count
    return torch.cat(outs)


def attend(
    kernel: PagedKernel, case: Case, scale: float, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    new_keys, new_values = case.new(case.keys), case.new(case.values)
    return kernel.attend(case.batch, case.query, new_keys, new_values, case.pool_keys, case.pool_values, scale, window, softcap)


SHAPES = [(0, 1), (36, 1), (7, 1), (63, 1), (0, 37), (31, 18), (5, 2), (100, 3)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (16, 2)])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (9, None), (None, 2.0), (40, 5.0)])
def test_equals_attention_written_out(
    kernel: PagedKernel, dtype: torch.dtype, width: int, heads: int, kv_heads: int, window: int | None, softcap: float | None
) -> None:
    case = make_case(dtype, heads, kv_heads, width, SHAPES)
    got = attend(kernel, case, 0.3, window, softcap)
    torch.testing.assert_close(
        got.double(), expected(case, 0.3, window, softcap), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4
    )


def test_new_tokens_go_to_their_places_and_nothing_else_changes(kernel: PagedKernel) -> None:
    case = make_case(torch.float32, 4, 2, 32, SHAPES)
    keys, values = case.pool_keys.clone(), case.pool_values.clone()
    for i, (context, count) in enumerate(case.shapes):
        for position in range(context, context + count):
            keys[case.place(i, position)], values[case.place(i, position)] = case.keys[i][position], case.values[i][position]
    attend(kernel, case, 0.2)
    torch.testing.assert_close(case.pool_keys, keys, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(case.pool_values, values, rtol=0, atol=0, equal_nan=True)


def test_takes_queries_in_the_order_transformers_hands_over(kernel: PagedKernel) -> None:
    case = make_case(torch.float32, 6, 2, 64, SHAPES)
    want = attend(kernel, case, 0.125)
    heads_first = case.query.transpose(0, 1).contiguous().transpose(0, 1)  # strides of [1, heads, tokens, width]
    wide = torch.randn(len(case.query), 2, 100)
    wide[:, :, :64] = case.new(case.keys)
    got = kernel.attend(case.batch, heads_first, wide[:, :, :64], case.new(case.values), case.pool_keys, case.pool_values, 0.125)
    assert torch.equal(got, want)


def test_reads_new_tokens_from_the_pool_when_none_are_given(kernel: PagedKernel) -> None:
    case = make_case(torch.bfloat16, 6, 2, 64, SHAPES)
    want = attend(kernel, case, 0.125)
    got = kernel.attend(case.batch, case.query, None, None, case.pool_keys, case.pool_values, 0.125)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_sequence_does_not_depend_on_the_batch(kernel: PagedKernel, dtype: torch.dtype) -> None:
    case = make_case(dtype, 9, 3, 64, SHAPES)
    together = attend(kernel, case, 0.125)
    for i, (start, end) in enumerate(
        zip(case.batch.query_starts[:-1].tolist(), case.batch.query_starts[1:].tolist(), strict=True)
    ):
        alone = PagedBatch(
            torch.tensor([0, end - start], dtype=torch.int32),
            case.batch.lengths[i : i + 1].clone(),
            case.batch.tables[i : i + 1].clone(),
        )
        got = kernel.attend(alone, case.query[start:end], None, None, case.pool_keys, case.pool_values, 0.125)
        assert torch.equal(got, together[start:end])


def test_two_threads_give_the_same(kernel: PagedKernel) -> None:
    case = make_case(torch.float32, 9, 3, 64, SHAPES)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = attend(kernel, case, 0.125)
        torch.set_num_threads(2)
        got = attend(kernel, case, 0.125)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(got, want)


def test_says_what_it_takes() -> None:
    assert PagedKernel.supports(torch.float32, 64) and PagedKernel.supports(torch.bfloat16, 80)
    assert not PagedKernel.supports(torch.float16, 64) and not PagedKernel.supports(torch.float32, 72)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder, with nothing loaded yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(paged_kernel, "load_library", build.load_library.__wrapped__)
    return tmp_path


def test_without_a_compiler_there_is_no_kernel_and_one_line_says_why(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    with caplog.at_level(logging.WARNING):
        assert paged_kernel.load.__wrapped__() is None
    assert len(caplog.messages) == 1 and "no C++ compiler" in caplog.messages[0]


def test_a_kernel_that_computes_something_else_is_not_used(
    kernel: PagedKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(PagedKernel, "attend", lambda self, batch, query, *rest: torch.zeros_like(query))
    assert paged_kernel.load.__wrapped__() is None
    assert "differ from torch's" in caplog.text


def test_two_that_build_at_once_both_get_a_library(kernel: PagedKernel, fresh: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        built = list(pool.map(build._build, [paged_kernel._SOURCE] * 2))
    assert built[0] == built[1]
    assert ctypes.CDLL(str(built[0])).triptych_attend_float32
    assert [path.name for path in (fresh / "triptych").iterdir()] == [built[0].name]


def test_a_source_that_does_not_compile_is_unavailable(kernel: PagedKernel, fresh: Path) -> None:
    source = fresh / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(build.Unavailable, match="failed"):
        build.load_library.__wrapped__(source)


def test_the_process_holds_one_openmp_runtime(kernel: PagedKernel) -> None:
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    assert len(mapped) == 1
