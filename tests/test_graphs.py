"""Inductor, AOTInductor and CUDA graphs: results, gradients, and what a capture does with kernels that are not there yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import assert_agree, assert_same
from layouts import draw
from processes import run_python
from torch import Tensor, nn

import cupyfused
from cupyfused import fused_scale_bias, fused_scale_bias_clamp
from cupyfused.nn import ScaleBiasClamp

IGNORED = (  # what PyTorch says
    "ignore:.isinstance.treespec, LeafSpec",  # of the trees in its exported programs
    "ignore:.torch.jit",
    "ignore:TensorFloat32",
    "ignore:Unable to hit fast path of CUDAGraphs",  # of gradients that a test leaves behind
    "ignore:The CUDA Graph is empty",  # of its own warm-up
)
# A leaf's accumulation node belongs to the stream of its first backward, here that of a warm-up; PyTorch says so of any op.
STREAMS = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
MODES = ("decompose", "opaque")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    torch.compiler.reset()
    cupyfused.set_compile_mode(request.param)
    yield request.param
    cupyfused.set_compile_mode("decompose")
    torch.compiler.reset()


class Model(nn.Module):
    """A matrix product before and after, as where a call on the wrong stream gave wrong numbers for large sizes only."""

    def __init__(self, width: int, device: str, dtype: torch.dtype):
        super().__init__()
        self.first, self.last = (nn.Linear(width, width, device=device, dtype=dtype) for _ in range(2))
        self.middle = ScaleBiasClamp(width, -0.5, 0.625, dim=-1, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_compiled_call_may_be_the_first(impl: str) -> None:
    """cupyfused was imported before torch, so that Dynamo meets our own imports while it traces."""
    code = f"""
    import cupyfused, torch
    step = torch.compile(lambda x: cupyfused.fused_scale_bias(x, 1.5, 0.25, impl={impl!r}), backend="eager", fullgraph=True)
    for size in (4, 5):
        x = torch.rand(size)
        torch.testing.assert_close(step(x), x * 1.5 + 0.25)
    """
    run_python(code)


def compare(model: nn.Module, compiled: Any, x: Tensor) -> None:
    """Forward and backward, against the model as it is."""
    found, expected = [], []
    for function, results in ((model, expected), (compiled, found)):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        results += [y.detach().clone(), *torch.autograd.grad(y.square().sum(), [leaf, *model.parameters()])]
        results[1:] = [one.clone() for one in results[1:]]
    for one, right in zip(found, expected, strict=True):
        assert_agree(one, right, added=1e5)


@pytest.mark.filterwarnings(*IGNORED)
def test_aot_inductor(tmp_path: Path, generator: torch.Generator) -> None:
    """Compiled ahead into a package that runs without Python; decomposed, as it is by default, it needs nothing of ours.

    On a CPU: on an H200, PyTorch 2.11's loader of packages ended with a segmentation fault for a model of its own layers too.
    """
    model = Model(16, "cpu", torch.float32).eval()
    x = draw(generator, (4, 16), torch.float32)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    with torch.no_grad():
        for rows in (4, 9):
            x = draw(generator, (rows, 16), torch.float32)
            assert_agree(loaded(x), model(x))


@pytest.mark.filterwarnings(*IGNORED)
def test_onnx(generator: torch.Generator) -> None:
    """Exported through the decomposition, so any ONNX runtime can run it; here the reference one, with another batch size."""
    from onnx.reference import ReferenceEvaluator

    model = Model(16, "cpu", torch.float32).eval()
    rows = {0: torch.export.Dim("rows", min=2)}
    program = torch.onnx.export(
        model, (draw(generator, (4, 16), torch.float32),), dynamo=True, dynamic_shapes=(rows,), verbose=False
    )
    assert program is not None
    exported = ReferenceEvaluator(program.model_proto)
    (name,) = exported.input_names
    for rows_now in (4, 9):
        x = draw(generator, (rows_now, 16), torch.float32)
        (y,) = exported.run(None, {name: x.numpy()})
        assert_agree(torch.from_numpy(y), model(x).detach())


@pytest.mark.filterwarnings(*IGNORED)
def test_inductor_on_the_cpu(generator: torch.Generator, mode: str) -> None:
    """Its C++ code, where there is a compiler; the GPU's is below."""
    model = Model(16, "cpu", torch.float32)
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (3, 5):
        compare(model, compiled, draw(generator, (rows, 16), torch.float32))


@pytest.mark.gpu
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("setting", [{}, {"dynamic": True}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}], ids=str)
def test_inductor(generator: torch.Generator, mode: str, setting: dict[str, Any]) -> None:
    """Five calls with other data each, so that a replay that kept anything would show."""
    model = Model(256, "cuda", torch.float32)
    compiled = torch.compile(model, fullgraph=True, **setting)
    for rows in (64,) * 5 + (96,):
        torch.compiler.cudagraph_mark_step_begin()
        compare(model, compiled, draw(generator, (rows, 256), torch.float32, "cuda"))


@pytest.mark.gpu
@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("mode", ["opaque"], indirect=True)
def test_reduce_overhead_with_large_sizes(generator: torch.Generator, mode: str) -> None:
    model = Model(4096, "cuda", torch.bfloat16)
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for rows in (256, 8192, 16384):
            for _ in range(3):
                x = draw(generator, (rows, 4096), torch.bfloat16, "cuda")
                torch.compiler.cudagraph_mark_step_begin()
                assert_agree(compiled(x).clone(), model(x), added=4096)


@pytest.mark.gpu
@pytest.mark.filterwarnings(*IGNORED)
def test_a_changing_number_in_a_captured_graph(generator: torch.Generator, mode: str) -> None:
    """A number that a graph kept by value would be the one of its capture."""
    x = draw(generator, (1025,), torch.float32, "cuda")
    compiled = torch.compile(lambda x, bound: fused_scale_bias_clamp(x, 2.0, bound, -bound, bound), mode="reduce-overhead")
    for k in range(12):
        bound = 0.1 * (k + 1)
        torch.compiler.cudagraph_mark_step_begin()
        assert_agree(compiled(x, bound).clone(), torch.clamp(x * 2.0 + bound, -bound, bound), added=1)


@pytest.mark.gpu
@STREAMS
def test_make_graphed_callables(generator: torch.Generator) -> None:
    model = nn.Sequential(nn.Linear(32, 32), ScaleBiasClamp(32, -0.5, 0.5, dim=-1), nn.Linear(32, 8)).cuda()
    x = draw(generator, (16, 32), torch.float32, "cuda").requires_grad_()
    reference = nn.Sequential(*list(model))
    graphed = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(5):
        x = draw(generator, (16, 32), torch.float32, "cuda").requires_grad_()
        results = []
        for function in (graphed, reference):
            y = function(x)
            results.append(
                [y.detach().clone(), *[one.clone() for one in torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]]
            )
        for one, right in zip(*results, strict=True):
            assert_agree(one, right)


@pytest.mark.gpu
def test_capture_with_nothing_compiled(tmp_path: Path) -> None:
    """Forward and backward, in a fresh process with an empty cache: compiled and loaded while the stream captures."""
    code = """
        import torch, cupyfused
        x = torch.linspace(-1, 1, 33 * 64, device="cuda").view(64, 33).requires_grad_()
        scale = torch.linspace(1, 2, 33, device="cuda", requires_grad=True)
        torch.autograd.grad((x * scale).sum(), (x, scale))  # PyTorch's own libraries are up
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cupyfused.fused_scale_bias_clamp(x, scale, 0.25, -1.0, 1.0)
            gradients = torch.autograd.grad(y, (x, scale), torch.ones_like(y))
        for _ in range(3):
            with torch.no_grad():
                x.mul_(-0.75)
            graph.replay()
            right = (x * scale + 0.25).clamp(-1, 1)
            torch.testing.assert_close(y, right)
            for one, exact in zip(gradients, torch.autograd.grad(right.sum(), (x, scale))):
                torch.testing.assert_close(one, exact)
        print("right")
    """
    assert run_python(code, CUPYFUSED_CACHE_DIR=str(tmp_path / "cache")).strip() == "right"


@pytest.mark.gpu
@STREAMS
def test_graphs_of_a_side_stream_share_nothing(generator: torch.Generator) -> None:
    """Two graphs captured one after the other, replayed in turn: neither writes into what the other holds."""
    inputs = [draw(generator, (64, 33), torch.float32, "cuda").requires_grad_() for _ in range(2)]
    scale = draw(generator, (33,), torch.float32, "cuda").requires_grad_()

    def step(x: Tensor) -> list[Tensor]:
        y = fused_scale_bias(x, scale, 0.5)
        return [y, *torch.autograd.grad(y.square().sum(), (x, scale))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for x in inputs:
            step(x)
    torch.cuda.current_stream().wait_stream(side)
    graphs, captured = [torch.cuda.CUDAGraph() for _ in inputs], []
    for graph, x in zip(graphs, inputs):
        with torch.cuda.graph(graph):
            captured.append(step(x))
    for _ in range(3):
        for graph, x in zip(graphs, inputs):
            with torch.no_grad():
                x.copy_(draw(generator, x.shape, x.dtype, "cuda"))
            graph.replay()
        for x, replayed in zip(inputs, captured):
            for one, right in zip(replayed, step(x), strict=True):
                assert_same(one.detach(), right.detach())
