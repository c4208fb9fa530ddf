"""Tiny random checkpoints of real families, each with a real processor, for tests without a network.

folder = checkpoints.cached("smolvlm")
model = AutoModelForImageTextToText.from_pretrained(folder)
processor = AutoProcessor.from_pretrained(folder)
inputs = checkpoints.inputs_for(processor, ["Compare", pictures[0], "with", pictures[1]])
model(**inputs)
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import checkpoint_extras  # noqa: F401  registers its recipes and those of checkpoint_families
import numpy as np
import tokenizers
import torch
import transformers
from checkpoint_parts import RECIPES
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, BatchFeature, PreTrainedModel, ProcessorMixin

SOURCES = ("checkpoints.py", *(f"checkpoint_{part}.py" for part in ("parts", "tokenizers", "families", "extras")))
GENERIC = {
    name: make
    for name, make in RECIPES.items()
    if name in {"qwen3_5", "lfm2_vl", "minicpmv4_6"}  # recurrent or convolutional layers: no packed row
}
FAMILIES = {name: make for name, make in RECIPES.items() if name not in GENERIC}
LAST_NORMS = ("language_model.norm.weight", "text_model.norm.weight", "embedding_norm.weight")
VIDEO = (  # take videos and have get_video_features
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "llava_onevision",
    "gemma4",
    "kimi_k25",
    "qwen3_5",
)
Part = str | Image.Image | list[Image.Image]


def build(family: str, folder: Path) -> Path:
    """Write the checkpoint of `family` into `folder`; the same bytes every time."""
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        recipe = {**FAMILIES, **GENERIC}[family]()
        model = AutoModelForImageTextToText.from_config(recipe.config).eval()
        redraw(model, recipe.gain, silent=_silent_ids(recipe.processor, model))
        model.generation_config.do_sample = False
        model.save_pretrained(folder)
        recipe.processor.save_pretrained(folder)
    return folder


def cached(family: str) -> Path:
    """The folder of a checkpoint that is built once per machine and version of its sources. Read only."""
    root = Path(tempfile.gettempdir()) / f"mmprefill-checkpoints-{os.getuid()}" / _version()
    folder = root / family
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{family}-", dir=root))
        try:
            build(family, draft)
            with contextlib.suppress(OSError):  # another process was first
                draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


def load(folder: Path) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Model and processor, as any user would load them."""
    with quiet():
        return AutoModelForImageTextToText.from_pretrained(folder).eval(), AutoProcessor.from_pretrained(folder)


def picture(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A photo-like picture of `size` (width, height): soft colours, some texture."""
    random = np.random.default_rng(seed)
    soft = Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
    noise = random.integers(-24, 25, (size[1], size[0], 3))
    return Image.fromarray(np.clip(np.asarray(soft).astype(int) + noise, 0, 255).astype(np.uint8))


def prompt_for(processor: ProcessorMixin, parts: Sequence[Part]) -> str:
    """One user turn of text, pictures and videos (lists of frames) in order, by the checkpoint's template if any."""
    if processor.chat_template is None:
        texts = [part for part in parts if isinstance(part, str)]
        return "<image>" * (len(parts) - len(texts)) + " ".join(texts)
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": _kind(part)} for part in parts]
    return processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)


def inputs_for(processor: ProcessorMixin, parts: Sequence[Part]) -> BatchFeature:
    """What the checkpoint's own processor makes of one user turn; videos are taken whole, at two frames a second."""
    text = prompt_for(processor, parts)
    pictures = [part for part in parts if _kind(part) == "image"]
    videos = [part for part in parts if _kind(part) == "video"]
    doubled = bool(processor.tokenizer.bos_token) and text.startswith(processor.tokenizer.bos_token)
    media: dict[str, object] = {"images": [pictures]} if pictures else {}
    if videos:
        facts = [{"fps": 2.0, "total_num_frames": len(v), "frames_indices": list(range(len(v)))} for v in videos]
        media |= {"videos": videos, "video_metadata": facts, "do_sample_frames": False}
    with quiet(), numpy_copy_warning_ignored():
        return processor(text=[text], return_tensors="pt", add_special_tokens=not doubled, **media)


def _kind(part: Part) -> str:
    return "text" if isinstance(part, str) else "image" if isinstance(part, Image.Image) else "video"


@contextlib.contextmanager
def numpy_copy_warning_ignored() -> Iterator[None]:
    """With `return_tensors="pt"` the processors of GLM-4V and PaliGemma hand torch tensors to numpy, which warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__ implementation doesn't accept a copy", DeprecationWarning)
        yield


@torch.inference_mode()
def picture_effect(model: PreTrainedModel, processor: ProcessorMixin) -> float:
    """The largest change of a last logit when another picture of the same size is shown."""
    logits = [
        model(**inputs_for(processor, [picture(seed), "What is in this picture?"])).logits[0, -1] for seed in (1, 2)
    ]
    return (logits[0] - logits[1]).abs().max().item()


@torch.no_grad()
def redraw(model: PreTrainedModel, gain: float, silent: Sequence[int]) -> None:
    """Redraw every weight so that each one matters: logits within about +-2, attention neither flat nor one-hot.

    Default initialisations leave some projectors at zero and most others so small that pictures change nothing.
    The rows of the output layer in `silent` are made small: a model hardly ever writes a control token unasked.
    """
    normal = torch.Generator().manual_seed(1)
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    tied = 2.0 if head is embedding else 1.0  # small embeddings and a large last norm, or a token would call itself
    for name, weight in sorted(model.named_parameters()):
        if not weight.is_floating_point():
            continue
        noise = torch.randn(weight.shape, generator=normal)
        if weight.dim() == 1:
            weight.add_(0.1 * noise)  # norms keep their centre, biases leave zero
            if name.endswith(LAST_NORMS):
                weight.add_(tied - 1.0)
        elif weight is embedding or weight is head:
            weight.copy_(noise * 0.75 / tied / weight.shape[-1] ** 0.5)
        elif weight.shape[0] == 1 or _is_table(model, weight):
            weight.copy_(noise * 0.3)
        else:
            fan_in = weight.shape[-1] if weight.dim() == 2 or "experts" in name else weight[0].numel()
            weight.copy_(noise * 1.3 * gain / fan_in**0.5)
    head[list(silent)] *= 0.1


def _is_table(model: PreTrainedModel, weight: torch.Tensor) -> bool:
    return any(isinstance(module, torch.nn.Embedding) and module.weight is weight for module in model.modules())


def _silent_ids(processor: ProcessorMixin, model: PreTrainedModel) -> list[int]:
    tokenizer = processor.tokenizer
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(special | set(range(len(tokenizer), model.get_output_embeddings().weight.shape[0])))


def _version() -> str:
    digest = hashlib.sha256(repr((transformers.__version__, torch.__version__, tokenizers.__version__)).encode())
    for source in SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' log and progress bars; Python warnings are left alone."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
