"""A timm tower, a projector and a language model become a checkpoint that plain transformers loads and we prefill."""

import functools

import checkpoints
import pytest
import timm
import torch
import transformers as hf
from checkpoint_tokenizers import byte_level, sentencepiece_like

from mmprefill import Prefiller
from mmprefill.encoders.timm_vision import assemble
from mmprefill.errors import ModelError, UnsupportedModelError

SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
TOWERS = {  # rotary positions and a class token; layer scale and a class token; neither a class token nor a head
    "vit_pe_core_large_patch14_336": {**SMALL, "img_size": 56, "ref_feat_shape": (4, 4)},
    "vit_small_patch14_dinov2": {**SMALL, "img_size": 56, "init_values": 0.5},
    "vit_base_patch16_siglip_224": {**SMALL, "img_size": 64},
}
OTHERS = {
    "vit_tiny_patch16_224": {**SMALL, "img_size": 64},
    "beit_base_patch16_224": {**SMALL, "img_size": 64},
    "eva02_tiny_patch14_224": {**SMALL, "img_size": 56},
    "vit_relpos_small_patch16_224": {**SMALL, "img_size": 64},
    "vit_small_patch14_reg4_dinov2": {**SMALL, "img_size": 56, "reg_tokens": 0},
}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 448,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}
PICTURES = [checkpoints.picture(1, (64, 64)), checkpoints.picture(2, (150, 50))]


@pytest.fixture(autouse=True)
def no_bars():
    with checkpoints.quiet():
        yield


def words(*specials):
    return byte_level(["<|end|>", *specials], eos_token="<|end|>", pad_token="<|end|>")


@functools.cache
def chat_words():
    return words("<|im_start|>", "<|im_end|>")


LANGUAGES = {
    "llama": lambda: hf.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": lambda: hf.Qwen2Config(**SIZES, tie_word_embeddings=True),
}


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    @functools.cache
    def make(vision, language="llama"):
        folder = tmp_path_factory.mktemp("vlm")
        args = {**TOWERS, **OTHERS}[vision]
        return assemble(
            folder, vision=vision, model_args=args, language=LANGUAGES[language](), tokenizer=chat_words(), seed=3
        )

    return make


@pytest.mark.parametrize(("vision", "language"), [*((each, "llama") for each in TOWERS), (next(iter(TOWERS)), "qwen2")])
@torch.inference_mode()
def test_plain_transformers_loads_it_and_prefill_equals_it(assembled, vision, language):
    folder = assembled(vision, language)
    model, processor = checkpoints.load(folder)
    turns = [["What is it?", PICTURES[0]], ["Compare", PICTURES[0], "and", PICTURES[0], "."], ["No picture."]]
    expected = [model(**checkpoints.inputs_for(processor, parts)).logits[0, -1] for parts in turns]
    with Prefiller.from_pretrained(folder) as engine:
        content = [
            [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
            for parts in turns
        ]
        results = engine.prefill_many([[{"role": "user", "content": each}] for each in content])
        for result, logits in zip(results, expected, strict=True):
            assert result.route == "packed"
            assert (result.next_token_logits - logits).abs().max() < 1e-4
        inputs = checkpoints.inputs_for(processor, turns[0])
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert results[0].generate(6).token_ids == tuple(tokens.tolist())


@pytest.mark.parametrize("vision", [*TOWERS, *OTHERS])
def test_pictures_change_logits(assembled, vision):
    assert checkpoints.picture_effect(*checkpoints.load(assembled(vision))) > 1e-2


def test_pictures_of_unlike_shapes_share_a_request(assembled):
    with Prefiller.from_pretrained(assembled("vit_tiny_patch16_224")) as engine:
        both = engine.prefill("Compare.", images=PICTURES)
        assert [sum(b - a for a, b in runs) for runs in both.spans] == [5 * 4, 4 * 4]
        swapped = engine.prefill("Compare.", images=PICTURES[::-1])
    assert (both.next_token_logits - swapped.next_token_logits).abs().max() > 1e-3


def test_the_same_seed_gives_the_same_files(assembled, tmp_path):
    first = assembled("vit_tiny_patch16_224")
    state = torch.get_rng_state()
    again, other = (
        assemble(
            tmp_path / str(seed),
            vision="vit_tiny_patch16_224",
            model_args=OTHERS["vit_tiny_patch16_224"],
            language=LANGUAGES["llama"](),
            tokenizer=chat_words(),
            seed=seed,
        )
        for seed in (3, 4)
    )
    assert torch.equal(state, torch.get_rng_state())
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (first, again, other)]
    assert files[0] == files[1]
    assert files[0]["model.safetensors"] != files[2]["model.safetensors"]


@torch.inference_mode()
def test_a_language_model_keeps_its_weights_and_is_not_touched(tmp_path):
    """Text alone gives the language model's own logits, with two more tokens that it hardly ever writes."""
    torch.manual_seed(0)
    causal = hf.AutoModelForCausalLM.from_config(hf.LlamaConfig(**{**SIZES, "vocab_size": len(chat_words())})).eval()
    before = {name: tensor.clone() for name, tensor in causal.state_dict().items()}
    folder = assemble(
        tmp_path / "vlm",
        vision="vit_tiny_patch16_224",
        model_args=OTHERS["vit_tiny_patch16_224"],
        language=causal,
        tokenizer=chat_words(),
    )
    model, processor = checkpoints.load(folder)
    ids = torch.arange(5, 40)[None]
    ours, its = model(input_ids=ids).logits, causal(input_ids=ids).logits
    assert its.shape[-1] == len(chat_words()) == ours.shape[-1] - 2
    assert (ours[..., :-2] - its).abs().max() < 1e-5
    assert not set(ours.argmax(-1).flatten().tolist()) & {model.config.image_token_id, model.config.video_token_id}
    assert all(torch.equal(tensor, before[name]) for name, tensor in causal.state_dict().items())
    assert "<|image|>" not in chat_words().get_vocab()
    assert processor.tokenizer.image_token == "<|image|>"


@torch.inference_mode()
def test_a_folder_brings_language_model_and_tokenizer(tmp_path):
    torch.manual_seed(0)
    causal = hf.AutoModelForCausalLM.from_config(LANGUAGES["qwen2"]()).to(torch.bfloat16)
    causal.save_pretrained(tmp_path / "language")
    chat_words().save_pretrained(tmp_path / "language")
    vision = "vit_tiny_patch16_224"
    folder = assemble(tmp_path / "vlm", vision=vision, model_args=OTHERS[vision], language=tmp_path / "language")
    model, processor = checkpoints.load(folder)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert torch.equal(
        model.model.language_model.layers[0].mlp.up_proj.weight, causal.model.layers[0].mlp.up_proj.weight
    )
    assert "<|im_start|>user\n<|image|>x<|im_end|>" in checkpoints.prompt_for(processor, [PICTURES[0], "x"])


@pytest.mark.parametrize("form", ["module", "state dict", "with a head"])
@torch.inference_mode()
def test_weights_of_a_tower_are_taken(tmp_path, form):
    vision, args = "vit_base_patch16_siglip_224", TOWERS["vit_base_patch16_siglip_224"]
    torch.manual_seed(5)
    tower = timm.create_model(vision, num_classes=7 if form == "with a head" else 0, **args).eval()
    weights = tower.state_dict() if form == "state dict" else tower
    folder = assemble(
        tmp_path / "vlm",
        vision=vision,
        model_args=args,
        language=LANGUAGES["llama"](),
        tokenizer=chat_words(),
        vision_weights=weights,
    )
    model, processor = checkpoints.load(folder)
    pixels = checkpoints.inputs_for(processor, [PICTURES[0], "x"])["pixel_values"][0]
    assert torch.allclose(model.model.vision_tower(pixels).last_hidden_state, tower.forward_features(pixels), atol=1e-5)


def test_pictures_are_normalised_and_cut_as_asked(assembled, tmp_path):
    _, processor = checkpoints.load(assembled("vit_small_patch14_dinov2"))
    config = timm.create_model("vit_small_patch14_dinov2", **TOWERS["vit_small_patch14_dinov2"]).pretrained_cfg
    assert tuple(processor.image_processor.image_mean) == config["mean"]
    assert tuple(processor.image_processor.image_std) == config["std"]
    whole = assemble(
        tmp_path / "vlm",
        vision="vit_tiny_patch16_224",
        model_args=OTHERS["vit_tiny_patch16_224"],
        language=LANGUAGES["llama"](),
        tokenizer=chat_words(),
        tiles=1,
        pooling_ratio=1,
    )
    _, processor = checkpoints.load(whole)
    inputs = checkpoints.inputs_for(processor, [PICTURES[1], "x"])
    assert inputs["pixel_values"].shape == (1, 1, 3, 64, 64)
    assert (inputs["input_ids"] == processor.image_token_id).sum() == 16


# Templates


@pytest.mark.parametrize(
    ("tokenizer", "expected"),
    [
        (
            lambda: words("<|im_start|>", "<|im_end|>"),
            "<|im_start|>user\n<|image|>Hi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            lambda: words("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            "<|start_header_id|>user<|end_header_id|>\n\n<|image|>Hi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            lambda: sentencepiece_like(
                [], bos="<s>", dummy_prefix=True, first=["<unk>", "<s>", "</s>"], bos_token="<s>"
            ),
            "<s>User: <|image|>Hi\nAssistant:",
        ),
    ],
    ids=["ChatML", "Llama 3", "plain"],
)
def test_the_template_follows_the_tokenizers_role_tokens(tmp_path, tokenizer, expected):
    vision = "vit_tiny_patch16_224"
    folder = assemble(
        tmp_path / "vlm",
        vision=vision,
        model_args=OTHERS[vision],
        language=hf.LlamaConfig(**{**SIZES, "vocab_size": 512}),
        tokenizer=tokenizer(),
    )
    model, processor = checkpoints.load(folder)
    assert checkpoints.prompt_for(processor, [PICTURES[0], "Hi"]) == expected
    assert model.generation_config.do_sample is False
    with Prefiller.from_pretrained(folder) as engine:
        assert engine.prefill("Hi", images=[PICTURES[0]]).next_token_logits.isfinite().all()


# Refusals


@pytest.mark.parametrize(
    ("vision", "args", "reason"),
    [
        ("vit_small_patch14_reg4_dinov2", SMALL, r"5 tokens lead.*'reg_tokens': 0"),
        ("vit_small_patch16_dinov3", SMALL, r"5 tokens lead.*'num_reg_tokens': 0"),
        ("deit_tiny_distilled_patch16_224", SMALL, "2 tokens lead its patches, and PerceptionLM drops one at most$"),
        ("swin_tiny_patch4_window7_224", {}, r"features are \[1, 7, 7, 768\]"),
        ("samvit_base_patch16_224", SMALL, r"not \[pictures, tokens, width\]"),
        ("resnet18", {}, "not a vision transformer"),
        ("naflexvit_base_patch16_gap", SMALL, "not a vision transformer"),
        ("vit_tiny_patch16_224", {**SMALL, "img_size": (64, 32)}, "square"),
        ("vit_tiny_patch16_224", {**SMALL, "img_size": 16}, "grid of 1 x 1"),
        ("vit_tiny_patch16_224", {**SMALL, "colour": 3}, "timm does not build it"),
    ],
)
def test_towers_that_the_format_cannot_hold_are_refused_with_the_reason(tmp_path, vision, args, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        assemble(tmp_path, vision=vision, model_args=args, language=LANGUAGES["llama"](), tokenizer=chat_words())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: hf.Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0), "soft-capping"),
        (lambda: hf.GraniteConfig(**SIZES, logits_scaling=4.0), "scaling"),
        (lambda: hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=448), "embed_tokens"),
        (lambda: hf.PhiConfig(**SIZES), "without a bias"),
    ],
    ids=["gemma2", "granite", "gpt2", "phi"],
)
def test_language_models_that_the_format_cannot_hold_are_refused_with_the_reason(tmp_path, config, reason):
    vision = "vit_tiny_patch16_224"
    with pytest.raises(UnsupportedModelError, match=reason):
        assemble(tmp_path, vision=vision, model_args=OTHERS[vision], language=config(), tokenizer=chat_words())
    assert not any(tmp_path.iterdir())


def test_wrong_arguments_are_named(tmp_path):
    good = {"vision": "vit_tiny_patch16_224", "model_args": OTHERS["vit_tiny_patch16_224"]}
    language = LANGUAGES["llama"]()
    with pytest.raises(ModelError, match=r"no architecture 'vit_tiny_patch16_22'.*'vit_tiny_patch16_224'"):
        assemble(tmp_path, vision="vit_tiny_patch16_22", language=language, tokenizer=chat_words())
    with pytest.raises(ModelError, match="pass tokenizer="):
        assemble(tmp_path, **good, language=language)
    with pytest.raises(ModelError, match="no tokenizer"):
        assemble(tmp_path, **good, language=language, tokenizer=tmp_path)
    with pytest.raises(ModelError, match="no causal language model"):
        assemble(tmp_path, **good, language=tmp_path, tokenizer=chat_words())
    with pytest.raises(ModelError, match=r"missing or unknown: .*cls_token"):
        assemble(tmp_path, **good, language=language, tokenizer=chat_words(), vision_weights={})
    with pytest.raises(ValueError, match="not both"):
        assemble(tmp_path, **good, language=language, vision_weights={}, pretrained=True)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="is not empty"):
        assemble(tmp_path, **good, language=language, tokenizer=chat_words())
