"""Training over several processes, devices and threads: DDP, FSDP2, loader workers, DataParallel; it equals training alone."""

from __future__ import annotations

from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("PyTorch was built without torch.distributed", allow_module_level=True)

from checks import TOLERANCE, assert_agree, assert_same  # noqa: E402  (after importorskip: it imports torch)
from distributed_worker import STEPS, Frames, run_ranks, train_together  # noqa: E402
from layouts import draw  # noqa: E402
from models import COMPOSED, FUSED, SIDE, Network, redraw, train  # noqa: E402
from processes import run_python  # noqa: E402
from targets import CUDA, HOST, REFERENCE, Target  # noqa: E402

from cupyfused import fused_scale_bias  # noqa: E402
from cupyfused.nn import ScaleBiasClamp  # noqa: E402

two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
Results = dict[str, torch.Tensor]


def task(generator: torch.Generator) -> tuple[Results, torch.Tensor, torch.Tensor]:
    """Draw parameters, images, and what is right for them."""
    model = Network(COMPOSED).double()
    redraw(model, generator)
    return model.state_dict(), draw(generator, (8, 3, SIDE, SIDE), torch.float64), draw(generator, (8, 2), torch.float64)


def alone(state: Results, x: torch.Tensor, right: torch.Tensor, device: str) -> Results:
    """Train the composed network on the whole batch in this process; return losses and parameters."""
    model = Network(COMPOSED).to(device, torch.float64)
    model.load_state_dict(state)
    losses = train(model, x.to(device), right.to(device), STEPS)
    assert losses.unique().numel() == STEPS
    return {"losses": losses, **model.state_dict()}


# ---- processes that train one network -------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """What each rank made of a task, for each target and way of training, and what one process alone makes of it."""

    targets: list[Target]
    sharding: bool
    ranks: list[dict[str, Results]]
    expected: Results

    def of(self, target: Target, way: str) -> list[Results]:
        if way != "replicated" and not self.sharding:
            pytest.skip("PyTorch 2.6 shards on GPUs only: its streams of the CPU record no events")
        return [{name: value.cpu() for name, value in results[f"{target.impl} {way}"].items()} for results in self.ranks]


# Starting two processes takes far longer than all they do, so one pair trains in every way, on a CPU on both its targets.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param([REFERENCE, HOST], id="CPU, gloo"),
        pytest.param([CUDA], id="2 GPUs, NCCL", marks=[pytest.mark.gpu, two_devices]),
    ],
)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    targets, folder = request.param, tmp_path_factory.mktemp("ranks")
    drawn = task(torch.Generator().manual_seed(17))
    torch.save(drawn, folder / "task.pt")
    device = targets[0].device
    sharding = device == "cuda" or hasattr(torch.cpu.Stream, "record_event")
    ranks = run_ranks(train_together, folder, targets, sharding)
    return Trained(targets, sharding, ranks, {name: value.cpu() for name, value in alone(*drawn, device).items()})


@pytest.mark.parametrize("way", ["replicated", "sharded"])
def test_two_ranks_train_as_one_process_does(trained: Trained, way: str) -> None:
    """DistributedDataParallel, and `fully_shard` of an odd number of channels over two ranks: each sees half of a batch."""
    for target in trained.targets:
        first, second = trained.of(target, way)
        assert first.keys() == second.keys() == trained.expected.keys()
        assert_agree((first.pop("losses") + second.pop("losses")) / 2, trained.expected["losses"])
        for name, value in first.items():
            assert_same(value, second[name])
            assert_agree(value, trained.expected[name])


def test_parameters_gathered_in_bfloat16(trained: Trained) -> None:
    """`fully_shard` with a policy of mixed precision: loss for loss what the expression rounded once gives."""
    relative, absolute = TOLERANCE[torch.bfloat16]
    for target in trained.targets:
        for one, right in zip(trained.of(target, "bfloat16"), trained.of(target, "bfloat16 composed"), strict=True):
            assert {value.dtype for value in one.values()} == {torch.float32}
            assert one["losses"].unique().numel() == STEPS
            torch.testing.assert_close(one["losses"], right["losses"], rtol=relative, atol=absolute)
        first, second = trained.of(target, "bfloat16")
        for name in first.keys() - {"losses"}:
            assert_same(first[name], second[name])


# ---- loader workers ---------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12: the parent has threads
@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("after", ["nothing", pytest.param("CUDA", marks=pytest.mark.gpu)])
def test_loader_workers_normalise_tensors_and_arrays(method: str, after: str) -> None:
    """A parent that has used CUDA too: its workers call the operators on CPU memory."""
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot {method}")
    if after == "CUDA":
        fused_scale_bias(torch.ones(5, device="cuda", requires_grad=True), 2.0, 1.0).sum().backward()
    impls = ("auto", "reference", "host")
    frames = torch.utils.data.ConcatDataset([Frames(impl) for impl in impls])
    loader = torch.utils.data.DataLoader(frames, batch_size=3, num_workers=2, multiprocessing_context=method, timeout=60)
    tensors, arrays = (torch.cat(parts).split(len(Frames("auto"))) for parts in zip(*loader))
    whole = torch.stack([torch.from_numpy(Frames.frame(k)) for k in range(len(Frames("auto")))]).double()
    bias = torch.from_numpy(Frames.bias).double()
    for tensor, array in zip(tensors, arrays, strict=True):  # all of it is exact in float32
        assert_same(tensor, (whole[..., 1:] * bias[1:] + 0.5).float())
        assert_same(array, (whole / 64 + bias).clamp(-1, 1).float())
    assert len(tensors) == len(impls)


# ---- two devices in one process ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@two_devices
def test_data_parallel_trains_as_one_device_does(generator: torch.Generator) -> None:
    """Threads that call and differentiate on both devices at once, on replicas whose parameters are not leaves."""
    state, x, right = task(generator)
    model = Network(FUSED).to("cuda:0", torch.float64)
    model.load_state_dict(state)
    losses = train(torch.nn.DataParallel(model, [0, 1]), x.cuda(0), right.cuda(0), STEPS)
    expected = alone(state, x, right, "cuda:0")
    assert_agree(losses, expected.pop("losses"))
    for name, value in expected.items():
        assert_agree(model.state_dict()[name], value)


@pytest.mark.gpu
@two_devices
def test_modules_applied_in_parallel(generator: torch.Generator) -> None:
    """One module on each device; the current device stays what it was, after calls, gradients and errors."""
    modules = [ScaleBiasClamp(3, -1.0, 1.0, dtype=torch.float64, device=f"cuda:{index}") for index in (0, 1)]
    for module in modules:
        redraw(module, generator)
    inputs = [draw(generator, (4, 3, 5), torch.float64, f"cuda:{index}").requires_grad_() for index in (0, 1)]
    for current in (0, 1):
        with torch.cuda.device(current):
            results = torch.nn.parallel.parallel_apply(modules, inputs)
            for module, x, y in zip(modules, inputs, results, strict=True):
                leaves = (x, module.weight, module.bias)
                right = torch.clamp(x * module.weight[:, None] + module.bias[:, None], -1, 1)
                assert_agree(y, right)
                found, expected = (torch.autograd.grad(one.square().sum(), leaves) for one in (y, right))
                for gradient, one in zip(found, expected, strict=True):
                    assert_agree(gradient, one)
                assert torch.cuda.current_device() == current
            with pytest.raises(ValueError, match="cuda:1"):
                modules[0](inputs[1])
            with pytest.raises(ValueError, match="ScaleBiasClamp"):
                modules[1](inputs[1][:, :2])
            assert torch.cuda.current_device() == current
            assert torch.empty(1, device="cuda").device.index == current


@pytest.mark.gpu
@two_devices
@pytest.mark.parametrize("current", ["torch.cuda.device(1)", "contextlib.nullcontext()"], ids=["1 current", "0 current"])
def test_a_process_on_the_second_device_takes_no_memory_of_the_first(current: str) -> None:
    """A CUDA context takes some 500 MiB. PyTorch's own operations open none there, so ours must not."""
    code = f"""
        import contextlib, ctypes, torch
        from models import COMPOSED, FUSED

        driver = ctypes.CDLL("libcuda.so.1")

        def contexts():
            states = []
            for device in (0, 1):
                flags, active = ctypes.c_uint(), ctypes.c_int()
                assert driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0
                states.append(bool(active.value))
            return states

        with {current}:
            for operators in (COMPOSED, FUSED):
                module = operators.module(3, -1.0, 1.0).to("cuda:1")
                x = torch.linspace(-2, 2, 60, device="cuda:1").view(4, 3, 5).requires_grad_()
                for _ in range(10):
                    operators.scale_bias(module(x), x, module.bias[:, None]).square().sum().backward()
                torch.cuda.synchronize("cuda:1")
                print(operators is FUSED, *contexts())
    """
    assert run_python(code).splitlines() == ["False False True", "True False True"]
