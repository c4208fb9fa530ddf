"""Every test starts from, and leaves behind, the same process: no network, one torch thread, no global changed."""

import gc
import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="mmprefill-tests-")  # no calibration of this machine in here
os.environ.setdefault("MMPREFILL_KERNELS", os.path.join(tempfile.gettempdir(), f"mmprefill-kernels-{os.getuid()}"))

import socket

import pytest
from PIL import Image, ImageFile

# torch is imported below: the process that hands tests to others runs none, and they wait until it is up.


def pytest_configure():
    gc.disable()  # what imports make stays


@pytest.hookimpl(trylast=True)  # after they were shuffled
def pytest_collection_modifyitems(items):
    """What may take minutes comes first, beside all the rest: nobody waits for it at the end."""
    items.sort(key=lambda item: item.get_closest_marker("end_to_end") is None)


def pytest_collection_finish():
    import torch

    torch.set_num_threads(1)  # tiny models: a second thread costs more than it does, and tests stay reproducible
    gc.freeze()  # hundreds of thousands of objects that no collection has to look at again
    gc.enable()


def process_globals():
    import torch

    return {
        "torch threads": torch.get_num_threads(),
        "torch default dtype": torch.get_default_dtype(),
        "torch gradients": torch.is_grad_enabled(),
        "Pillow's pixel limit": Image.MAX_IMAGE_PIXELS,
        "Pillow's truncated files": ImageFile.LOAD_TRUNCATED_IMAGES,
        "socket timeout": socket.getdefaulttimeout(),
        "folder": os.getcwd(),
    }


@pytest.fixture(autouse=True)
def globals_unchanged():
    before = process_globals()
    yield
    assert process_globals() == before


@pytest.fixture
def data(tmp_path):
    """A folder with four pictures, for batch jobs."""
    import checkpoints  # takes transformers, which most tests can do without

    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(4):
        checkpoints.picture(i).save(folder / f"p{i}.png")
    return folder
