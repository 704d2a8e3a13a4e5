"""Models, weights and data by name; every mistake in a name is one clear error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import fairpruner as fp
from fairpruner.inputs.datasets import Preprocessing, Sampling, draw_balanced, example_of, load_data
from fairpruner.inputs.sources import example_for, factory_of, load_model, resolve, transform_of
from fairpruner.inputs.weights import load_weights

NET = """
import torch
from torch import nn
from neighbour import WIDTH

def build():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))

def number():
    return 3

def fails():
    raise OSError("no disk")

def loader():
    for start in range(3):
        yield torch.full((5, 4), float(start)), torch.arange(5) % 3
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file with a factory that imports its neighbour."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("WIDTH = 8\n")
    (tmp_path / "net.py").write_text(NET)
    yield tmp_path / "net.py"
    sys.modules.pop("neighbour", None)


# Models


def test_a_factory_in_a_file_may_import_its_neighbours(net: Path) -> None:
    assert load_model(f"{net}:build")[0].out_features == 8


def test_a_factory_in_a_module_of_the_working_folder(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(net.parent)
    assert isinstance(load_model("net:build"), nn.Sequential)


@pytest.mark.parametrize(
    ("source", "shape"),
    [
        ("timm:resnet18", (3, 224, 224)),
        ("timm:resnet18.a1_in1k", (3, 224, 224)),
        ("torchvision:inception_v3", (3, 299, 299)),
    ],
)
def test_zoo_models_know_their_preprocessing(
    source: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "torchvision:inception_v3":  # its random initialisation takes half a minute
        model: nn.Module = nn.Identity()
    else:
        model = factory_of(source)()
    assert example_for(source, model).shape == (1, *shape)
    transform = transform_of(source, model)
    assert transform is not None
    from PIL import Image

    white = transform(Image.new("RGB", (400, 300), (255, 255, 255)))
    torch.testing.assert_close(
        white[:, 0, 0], torch.tensor([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    )


def test_a_model_of_ones_own_has_no_preprocessing() -> None:
    assert transform_of("torch.nn:Identity", nn.Identity()) is None
    assert example_for("torch.nn:Identity", nn.Identity()) is None


@pytest.mark.parametrize(
    ("library", "argument"),
    [
        ("timm", ("create_model", {"pretrained": True})),
        ("torchvision.models", ("get_model", {"weights": "DEFAULT"})),
    ],
)
def test_pretrained_asks_the_zoo_for_its_weights(
    library: str, argument: tuple[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, expected = argument
    asked: list[dict[str, Any]] = []

    def fake(name: str, **options: Any) -> nn.Module:
        asked.append({"name": name, **options})
        return nn.Identity()

    monkeypatch.setattr(f"{library}.{function}", fake)
    load_model(f"{library.partition('.')[0]}:resnet18", "pretrained")
    assert asked == [{"name": "resnet18", **expected}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("timm:resnet19", "timm has no model 'resnet19': did you mean 'resnet1"),
        ("torchvision:resnet5", "torchvision has no model 'resnet5': did you mean"),
        ("hf:./bert", "is not a folder here, and no model of this name can be downloaded"),
        (
            "resnet50",
            "names no function: expected timm:name, torchvision:name, hf:name, package.module:function",
        ),
        ("nowhere.py:build", "Cannot read nowhere.py: there is no such file"),
        ("no_such_module:build", "no_such_module does not import: ModuleNotFoundError"),
        ("{net}:biuld", "Unknown function of .*net.py 'biuld': did you mean 'build'"),
        ("{net}:number", "built a int, expected a torch.nn.Module"),
        ("{net}:WIDTH", "is a int, expected a function"),
        ("{net}:fails", "did not build a model: OSError: no disk"),
    ],
)
def test_a_wrong_source_is_one_clear_error(source: str, message: str, net: Path) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        load_model(source.format(net=net))


def test_a_function_is_not_asked_for_as_a_model() -> None:
    with pytest.raises(fp.FairprunerError, match=r"names no function: expected package\.module:function or"):
        resolve("loss")


def test_a_file_that_does_not_run_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(:\n")
    with pytest.raises(fp.FairprunerError, match=r"broken.py does not import: SyntaxError"):
        resolve(f"{tmp_path}/broken.py:build")


def test_pretrained_is_refused_for_a_model_of_ones_own(net: Path) -> None:
    with pytest.raises(fp.FairprunerError, match="'pretrained' works with timm, torchvision"):
        load_model(f"{net}:build", "pretrained")


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("raise RuntimeError('operator does not exist')", "installed but does not import .*fits torch"),
        (None, r"not installed .*fairpruner\[torchvision\]"),
    ],
)
def test_a_zoo_that_does_not_import_is_one_clear_error(
    broken: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    if broken:
        (tmp_path / "torchvision.py").write_text(broken)
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setattr(sys, "meta_path", [Missing("torchvision"), *sys.meta_path])
    with pytest.raises(fp.FairprunerError, match=message):
        load_model("torchvision:resnet18")


class Missing:
    """An import finder that pretends a package is not installed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, *_: Any) -> None:
        if name == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


# Weights


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


@pytest.mark.parametrize(
    "wrap", [lambda s: s, lambda s: {"state_dict": s, "epoch": 3}, lambda s: {"model": s}]
)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_checkpoints_may_wrap_the_state(wrap: Callable[[Any], Any], suffix: str, tmp_path: Path) -> None:
    trained, fresh = small_net(), small_net()
    torch.save(wrap(trained.state_dict()), tmp_path / f"w{suffix}")
    load_weights(fresh, tmp_path / f"w{suffix}")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in trained.state_dict().items())


def test_safetensors_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    trained, fresh = small_net(), small_net()
    save_file(trained.half().state_dict(), tmp_path / "w.safetensors")
    load_weights(fresh, tmp_path / "w.safetensors")
    assert fresh[0].weight.dtype == torch.float32
    assert torch.equal(fresh[0].weight, trained[0].weight.float())


def test_a_tied_tensor_may_be_stored_once(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    tied[1].weight = tied[0].weight
    weight = torch.randn(4, 4)
    save_file({"1.weight": weight}, tmp_path / "w.safetensors")
    load_weights(tied, tmp_path / "w.safetensors")
    assert torch.equal(tied[0].weight, weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.bias"), r"do not fit Sequential: 1 missing \(0.bias\)"),
        (
            lambda s: s.update({f"extra{i}": torch.zeros(1) for i in range(5)}),
            r"5 unexpected \(extra0, extra1, extra2, …\)",
        ),
        (
            lambda s: s.update({"2.weight": torch.zeros(10, 8)}),
            r"1 of another shape or kind \(2.weight torch.float32\[10, 8\] for torch.float32\[3, 8\]\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused_and_nothing_is_changed(
    change: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    state = small_net().state_dict()
    change(state)
    torch.save(state, tmp_path / "w.pt")
    fresh = small_net()
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(fp.FairprunerError, match=message):
        load_weights(fresh, tmp_path / "w.pt")
    assert all(torch.equal(value, fresh.state_dict()[name]) for name, value in before.items())


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("w.pt", lambda p: torch.save(small_net(), p), "hold more than tensors, which could run code"),
        ("w.pt", lambda p: torch.save([1, 2], p), "hold no state_dict"),
        ("w.pt", lambda p: p.write_bytes(b""), "cannot be read: EOFError: the file is empty or damaged"),
        ("w.pt", lambda p: p.write_bytes(b"damaged" * 9), "could run code, or the file is damaged"),
        ("w.safetensors", lambda p: p.write_text("text"), "is not a complete safetensors file"),
        ("w.bin", lambda p: p.write_text("text"), "Unknown kind of weights file '.bin'"),
        ("w.pt", lambda p: None, "No weights file"),
    ],
)
def test_unreadable_weights_are_one_clear_error(
    name: str, write: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    write(tmp_path / name)
    with pytest.raises(fp.FairprunerError, match=message):
        load_weights(small_net(), tmp_path / name)


# Data


def gather(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(data)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def save_arrays(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(1, 60), st.integers(0, 3))
def test_chosen_samples_are_as_even_over_classes_as_they_can_be(
    labels: list[int], samples: int, seed: int
) -> None:
    every = np.array(labels)
    chosen = draw_balanced(every, samples, seed)
    assert len(set(chosen.tolist())) == len(chosen) == min(samples, len(labels))
    took, has = np.bincount(every[chosen], minlength=5), np.bincount(every, minlength=5)
    most = took.max()
    assert all(t == h or t >= most - 1 for t, h in zip(took, has, strict=True))


def test_arrays_come_as_batches_as_often_as_they_are_iterated(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(10, 2, 3)).astype(np.float32), np.arange(10) % 4
    data = load_data(save_arrays(tmp_path / "d.npz", x=x, y=y), Sampling(batch_size=4), Preprocessing())
    assert [len(labels) for _, labels in data] == [4, 4, 2]
    (first, labels), (again, _) = gather(data), gather(data)
    assert torch.equal(first, again)
    assert sorted(map(tuple, first.flatten(1).tolist())) == sorted(map(tuple, x.reshape(10, -1).tolist()))
    assert torch.equal(torch.bincount(labels), torch.tensor([3, 3, 2, 2]))
    assert len(gather(load_data(str(tmp_path / "d.npz"), Sampling(samples=5), Preprocessing()))[1]) == 5


def test_bytes_are_scaled_and_normalised_by_channel(tmp_path: Path) -> None:
    x = np.zeros((2, 3, 1, 1), dtype=np.uint8)
    x[:, 1] = 255
    data = load_data(
        save_arrays(tmp_path / "d.npz", x=x, y=np.array([0, 1])),
        Sampling(),
        Preprocessing(mean=(0.5, 0.5, 0.25), std=(0.5, 0.25, 1.0)),
    )
    assert gather(data)[0][0].flatten().tolist() == [-1.0, 2.0, -0.25]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros((2, 1), np.float32)}, "has no array 'y'"),
        ({"x": np.zeros((2, 1), np.float32), "y": np.zeros(3, int)}, r"x of shape \[2, 1\] and y int64\[3\]"),
        (
            {"x": np.zeros((2, 1), np.float32), "y": np.zeros(2)},
            r"y float64\[2\], expected one whole-number label",
        ),
        ({"x": np.zeros((0, 1), np.float32), "y": np.zeros(0, int)}, "at least one sample"),
        (
            {"x": np.zeros((2, 1), np.int64), "y": np.zeros(2, int)},
            r"x of type int64, expected .*float32, float64\), or uint8",
        ),
        ({"x": np.array([{}, {}]), "y": np.zeros(2, int)}, "holds Python objects, expected numbers"),
    ],
)
def test_wrong_arrays_are_one_clear_error(arrays: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        load_data(save_arrays(tmp_path / "d.npz", **arrays), Sampling(), Preprocessing())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Preprocessing(mean=(0.1, 0.2)).normalise(torch.zeros(4, 3, 2, 2, dtype=torch.uint8)),
            "mean has 2 values for data of shape",
        ),
        (lambda: Preprocessing(std=(0.0,)), "expected positive"),
        (lambda: Preprocessing(size=0), "at least 1 pixel"),
        (lambda: Sampling(samples=0), "samples is 0, expected at least 1"),
        (lambda: Sampling(batch_size=-1), "batch_size is -1"),
        (lambda: Sampling(seed=-1), "seed=-1, expected a whole number of at least 0"),
        (lambda: load_data("nowhere", Sampling(), Preprocessing()), "is neither a folder that exists, nor"),
        (lambda: load_data("nowhere.npz", Sampling(), Preprocessing()), "Cannot read nowhere.npz"),
        (lambda: example_of([], torch.device("cpu")), "holds no samples"),
    ],
)
def test_wrong_data_options_are_one_clear_error(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        make()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes of one-colour images of different sizes, one file in a subfolder, and one file that is
    no image.
    """
    from PIL import Image

    for name, colour, size in (
        ("ant/1.png", (255, 0, 0), (40, 20)),
        ("ant/more/2.JPG", (255, 0, 0), (16, 48)),
        ("bee/3.png", (0, 255, 0), (20, 20)),
        ("bee/note.txt", None, None),
    ):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if colour:
            Image.new("RGB", size, colour).save(path)
        else:
            path.write_text("no image")
    return tmp_path / "photos"


def test_image_folders_are_resized_cropped_and_labelled_by_sorted_folder(photos: Path) -> None:
    x, y = gather(load_data(str(photos), Sampling(), Preprocessing(size=8)))
    assert x.shape == (3, 3, 8, 8)
    assert sorted(y.tolist()) == [0, 0, 1]
    for image, label in zip(x, y, strict=True):
        assert image.argmax(0).unique().tolist() == [int(label)]  # ants are red, bees green


def test_what_tools_hide_beside_images_is_no_class_and_no_image(photos: Path) -> None:
    for name in (".ipynb_checkpoints/1.png", "__MACOSX/ant/1.png", "ant/.git/1.png", "bee/._3.png"):
        (photos / name).parent.mkdir(parents=True, exist_ok=True)
        (photos / name).write_bytes(b"no image")
    x, y = gather(load_data(str(photos), Sampling(), Preprocessing(size=8)))
    assert sorted(y.tolist()) == [0, 0, 1]
    assert all(image.argmax(0).unique().tolist() == [int(label)] for image, label in zip(x, y, strict=True))


def test_a_mean_for_numbers_that_are_used_as_they_are_is_refused(tmp_path: Path) -> None:
    source = save_arrays(tmp_path / "d.npz", x=np.zeros((2, 3, 1, 1), np.float32), y=np.array([0, 1]))
    with pytest.raises(fp.FairprunerError, match="x of type float32, which is used as it is: leave out --me"):
        load_data(source, Sampling(), Preprocessing(mean=(0.5,)))


def test_the_centre_is_what_is_cropped() -> None:
    from PIL import Image

    image = Image.new("RGB", (12, 4))
    image.paste((255, 255, 255), (4, 0, 8, 4))
    assert Preprocessing(size=4)(image).min() == 1


def test_images_go_through_a_zoos_transform(photos: Path) -> None:
    x, _ = gather(
        load_data(
            str(photos),
            Sampling(samples=2),
            Preprocessing(),
            transform=lambda image: torch.tensor(image.size),
        )
    )
    assert sorted(map(tuple, x.tolist())) in ([(16, 48), (20, 20)], [(20, 20), (40, 20)])


def test_broken_and_missing_images_are_one_clear_error(photos: Path, tmp_path: Path) -> None:
    (photos / "bee" / "3.png").write_bytes(b"broken")
    with pytest.raises(fp.FairprunerError, match=r"3.png cannot be read"):
        gather(load_data(str(photos), Sampling(), Preprocessing(size=8)))
    with pytest.raises(fp.FairprunerError, match=r"no class subfolder with images \(.bmp .*expected folder/"):
        load_data(str(photos / "ant" / "more"), Sampling(), Preprocessing())


def test_images_of_several_sizes_need_a_size(photos: Path) -> None:
    with pytest.raises(fp.FairprunerError, match="--size"):
        gather(load_data(str(photos), Sampling(), Preprocessing()))


def test_a_loader_is_called_for_every_pass_and_stops_at_the_limit(net: Path) -> None:
    data = load_data(f"{net}:loader", Sampling(samples=6), Preprocessing())
    assert [len(y) for _, y in data] == [5, 5]
    assert [len(y) for _, y in data] == [5, 5]
    assert len(list(load_data(f"{net}:loader", Sampling(), Preprocessing()))) == 3
    assert example_of(data, torch.device("cpu")).shape == (1, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("number", "gave no batches: TypeError"),
        ("fails", "gave no batches: OSError: no disk"),
        ("WIDTH", "gave no batches: TypeError"),
    ],
)
def test_a_loader_that_gives_nothing_is_one_clear_error(net: Path, name: str, message: str) -> None:
    with pytest.raises(fp.FairprunerError, match=message):
        list(load_data(f"{net}:{name}", Sampling(), Preprocessing()))


@pytest.mark.slow
def test_importing_the_package_imports_no_optional_one() -> None:
    code = (
        "import sys, fairpruner.cli; print([m for m in ('timm', 'torchvision', 'transformers', 'sklearn',"
        " 'PIL', 'scipy') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
