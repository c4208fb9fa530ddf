"""Pictures and videos of a request: the right rows for each item at any size, and errors that stay with their item."""

import functools
import json
import shutil

import checkpoints
import engines
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmprefill import Prefiller
from mmprefill.config import PrefillConfig
from mmprefill.encoders import vision
from mmprefill.encoders.text import Intake
from mmprefill.errors import MediaError, ModelError, PlaceholderError, RequestError
from mmprefill.models import load
from mmprefill.pipeline import merge
from mmprefill.types import Request

ALL = [*checkpoints.FAMILIES, *checkpoints.GENERIC]
FRAMES = [checkpoints.picture(i) for i in range(4)]
ODD_FRAMES = [checkpoints.picture(i, (48, 64)) for i in range(3)]
PICTURE = checkpoints.picture(9, (70, 48))


@functools.cache
def loaded(family):
    """The plain model and processor, and another pair as the engine sees it."""
    engine = engines.cold(family)
    return *engines.plain(family), engine.session.family, engine.intake


def kind(part):
    return "text" if isinstance(part, str) else "video" if isinstance(part, list) else "image"


def request_of(parts, **fields):
    return Request(messages=[{"role": "user", "content": [{"type": kind(p), kind(p): p} for p in parts]}], **fields)


def stock_inputs(processor, parts):
    """What a user gets who passes frames without saying how fast they follow each other."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": kind(p)} for p in parts]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    media = {"images": [[p for p in parts if kind(p) == "image"]], "videos": [p for p in parts if kind(p) == "video"]}
    media = {name: items for name, items in media.items() if items not in ([], [[]])}
    doubled = bool(processor.tokenizer.bos_token) and text.startswith(processor.tokenizer.bos_token)
    sampling = {"do_sample_frames": False} if "videos" in media else {}
    with checkpoints.quiet(), checkpoints.numpy_copy_warning_ignored():
        return processor(text=[text], return_tensors="pt", add_special_tokens=not doubled, **media, **sampling)


def rows(runs):
    return sum(end - start for start, end in runs)


def encoded(family, prepared):
    """Every medium of a request through its tower."""
    return {item.medium: vision.encode(family, [item])[0] for item in vision.media_inputs(family, prepared)}


@torch.inference_mode()
def merged(family, pictures):
    _, _, described, intake = loaded(family)
    prepared = intake.prepare(Request(prompt="Compare them.", images=pictures))
    return prepared, merge.merge(described, prepared, encoded(described, prepared))


def each_is_as_alone(family, pictures, prepared, sequence):
    """The rows of every picture of a request are those of the picture alone."""
    for picture, item in zip(pictures, prepared.media, strict=True):
        one, alone = merged(family, [picture])
        inside, expected = (
            torch.cat([s.embeds[0, start:end] for start, end in runs])
            for s, runs in ((sequence, item.runs), (alone, one.media[0].runs))
        )
        assert (inside - expected).abs().max() < 1e-5


# Spans and digests


@pytest.mark.parametrize("family", ALL)
def test_another_second_picture_changes_rows_inside_its_span_only(family):
    first, second, other = (checkpoints.picture(seed, (64, 48) if seed == 1 else (90, 48)) for seed in (1, 2, 3))
    (one, before), (two, after) = merged(family, [first, second]), merged(family, [first, other])
    assert one.media[0].digest == two.media[0].digest != one.media[1].digest != two.media[1].digest
    changed = (before.embeds != after.embeds)[0].any(-1)
    for name, value in before.extras.items():  # deepstack and the like: rows of pictures only, in order
        changed |= changes_by_token(value, after.extras[name], one)
    inside = torch.zeros_like(changed)
    for start, end in one.media[1].runs:
        inside[start:end] = True
    assert changed.any()
    assert not changed[~inside].any()
    assert changed[inside].float().mean() > 0.5


def changes_by_token(value, other, prepared):
    """Which tokens' extras differ; extras hold a row for each token, or for each token of a picture."""
    if isinstance(value, (list, tuple, dict)):
        pairs = zip(*((v.values() if isinstance(v, dict) else v) for v in (value, other)), strict=True)
        return torch.stack([changes_by_token(a, b, prepared) for a, b in pairs]).any(0)
    length = len(prepared.input_ids)
    rows = [i for item in prepared.media for start, end in item.runs for i in range(start, end)]
    changed = torch.zeros(length, dtype=torch.bool)
    if length in value.shape[:2]:
        return changed | (value != other).reshape(length, -1).any(-1)
    assert value.shape[0] == len(rows)
    changed[rows] = (value != other).flatten(1).any(-1)
    return changed


@pytest.mark.parametrize("family", ALL)
def test_spans_hold_every_placeholder_once_and_in_order(family):
    _, _, described, intake = loaded(family)
    sizes = [(64, 48), (48, 64), (64, 48), (90, 30), (30, 90)]
    pictures = [checkpoints.picture(i, size) for i, size in enumerate(sizes)]
    prepared = intake.prepare(Request(prompt="x", images=pictures))
    places = [i for item in prepared.media for start, end in item.runs for i in range(start, end)]
    token = described.placeholders["image"]
    assert places == (prepared.input_ids == token).nonzero()[:, 0].tolist()
    alone = [intake.prepare(Request(prompt="x", images=[p])).media[0].runs for p in pictures]
    if family != "llava_onevision":  # where company changes the number of rows
        assert [sum(b - a for a, b in item.runs) for item in prepared.media] == [
            sum(b - a for a, b in r) for r in alone
        ]


@torch.inference_mode()
def test_pictures_of_unlike_tiles_share_a_request_where_the_processor_cannot_stack_them():
    """PerceptionLM: one row of all tiles is what its tower makes of any stack; the rows equal those of each alone."""
    _, processor, _, intake = loaded("perception_lm")
    pictures = [checkpoints.picture(0, (64, 48)), checkpoints.picture(1, (168, 56)), checkpoints.picture(2, (20, 20))]
    with pytest.raises(ValueError, match="Unable"):
        checkpoints.inputs_for(processor, [*pictures, "x"])
    prepared, sequence = merged("perception_lm", pictures)
    each_is_as_alone("perception_lm", pictures, prepared, sequence)
    clips = intake.prepare(Request(prompt="x", videos=[FRAMES, FRAMES[:3]]))
    assert [rows(item.runs) for item in clips.media] == [16, 12]


def test_unknown_spans_are_empty():
    """A processor that does not say where its replacements went: nothing is guessed."""
    _, processor, described, _ = loaded("llava_clip")

    class Silent(type(processor)):
        def __call__(self, *args, **kwargs):
            output = super().__call__(*args, **kwargs)
            output.pop("text_replacement_offsets")
            return output

    silent = Silent.__new__(Silent)
    silent.__dict__.update(processor.__dict__)
    intake = Intake(silent, described.placeholders, PrefillConfig(), 8192)
    prepared = intake.prepare(Request(prompt="x", images=[PICTURE, PICTURE]))
    assert [item.runs for item in prepared.media] == [(), ()]


# Videos


OPEN = {}


def prefiller(family):
    if family not in OPEN:
        OPEN[family] = engines.open_prefiller(family)
    return OPEN[family]


@pytest.fixture(scope="module", autouse=True)
def closed_prefillers():
    yield
    while OPEN:
        OPEN.popitem()[1].close()


QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
VIDEO = (*QWEN, "glm4v", "llava_onevision", "gemma4", "kimi_k25", "internvl", "perception_lm")
MIXTURES = {
    "one video": [FRAMES, "What happens?"],
    "odd number of frames": ["a", ODD_FRAMES, "b"],
    "two videos": [FRAMES, "then", [*FRAMES[1:], FRAMES[0]], "what?"],
    "a video, a picture": [FRAMES, "and", PICTURE, "what?"],
    "a picture, a video": ["first", PICTURE, "and", FRAMES, "what?"],
    "a picture between videos": [FRAMES, "1", PICTURE, "2", [*FRAMES[2:], *FRAMES[:2]], "3"],
}


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # Kimi's processor, two videos
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("family", VIDEO)
@torch.inference_mode()
def test_videos_prefill_as_plain_transformers(family, mixture):
    if family == "glm4v" and "picture" in mixture:
        pytest.skip("transformers 5.24 itself fails on a picture beside a video")
    model, processor, *_ = loaded(family)
    inputs = stock_inputs(processor, MIXTURES[mixture])
    result = prefiller(family).prefill(request_of(MIXTURES[mixture]))
    assert torch.equal(result.token_ids, inputs["input_ids"][0])
    assert (result.next_token_logits - model(**inputs).logits[0, -1]).abs().max() < 1e-4
    if family != "llava_onevision":  # its template puts pictures first
        places = [kind(part) for part in MIXTURES[mixture] if not isinstance(part, str)]
        spans = sorted(zip(sorted(places), result.spans, strict=True), key=lambda each: each[1][0])
        assert [medium for medium, _ in spans] == places


@pytest.mark.parametrize("family", QWEN)
def test_every_tensor_of_a_video_is_the_processors_default(family):
    _, processor, _, intake = loaded(family)
    for parts in MIXTURES.values():
        expected, inputs = stock_inputs(processor, parts), intake.prepare(request_of(parts)).inputs
        assert set(inputs) == set(expected)
        for name, value in inputs.items():
            assert torch.equal(value, torch.as_tensor(expected[name])), name


@torch.inference_mode()
def test_the_order_of_frames_and_of_media_matters():
    parts = MIXTURES["a picture, a video"]
    logits = [
        prefiller("qwen2_5_vl").prefill(request_of(each)).next_token_logits
        for each in (parts, [*parts[:3], parts[3][::-1], parts[4]], [parts[0], parts[3], parts[2], parts[1], parts[4]])
    ]
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert (logits[0] - logits[2]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["glm4v", "smolvlm"])
def test_a_mixture_that_the_model_cannot_take_is_a_request_error(family):
    with engines.open_prefiller(family) as engine:
        good, bad = engine.prefill_many([request_of(["x"]), request_of(MIXTURES["a picture, a video"], id="r")])
        assert isinstance(bad, RequestError)
        assert "request 'r'" in str(bad)
        assert good.next_token_logits.isfinite().all()


def test_frames_of_different_sizes_are_refused():
    with pytest.raises(MediaError, match="request 'r', video 2: its frames differ in size"):
        loaded("qwen2_vl")[3].prepare(Request(id="r", prompt="x", videos=[FRAMES, [FRAMES[0], PICTURE]]))


def test_a_damaged_frame_is_named():
    with pytest.raises(MediaError, match="request 'r', video 1, frame 2"):
        loaded("qwen2_vl")[3].prepare(Request(id="r", prompt="x", videos=[[FRAMES[0], b"no picture"]]))


# Sizes


@torch.inference_mode()
def assert_rows_match(family, size):
    _, _, described, intake = loaded(family)
    prepared = intake.prepare(Request(prompt="x", images=[checkpoints.picture(0, size)]))
    (item,) = vision.media_inputs(described, prepared)
    (output,) = vision.encode(described, [item])
    assert merge.row_count(output) in (item.rows, None), size  # Granite's rows lie in the layers' features
    merge.merge(described, prepared, {"image": output})


SWEEP = [(w, h) for w, h in zip(range(1, 420, 17), range(413, 0, -17), strict=False)]
EDGES = [
    (41, 42),
    (42, 41),
    (43, 85),
    (83, 84),
    (84, 85),
    (85, 84),
    (168, 42),
    (169, 43),
    (95, 126),
    (950, 1256),
    (1, 97),
    (97, 1),
]


@pytest.mark.parametrize("family", ["llava_next", "llava_onevision"])
def test_rows_equal_placeholders_at_every_size(family):
    """Unpadding rounds; the sizes around multiples of the tile are where it went wrong (cases B7)."""
    for size in [*SWEEP, *EDGES]:
        assert_rows_match(family, size)


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("size", [(1, 1), (60, 1), (1, 60), (90, 3), (3, 90), (28, 28), (333, 41)])
def test_any_size_is_right_or_an_error_of_its_own(family, size):
    intake = loaded(family)[3]
    try:
        intake.prepare(Request(prompt="x", images=[checkpoints.picture(0, size)]))
    except RequestError as error:
        assert isinstance(error, MediaError)
        assert "picture 1" in str(error)
        return
    # transformers 5.24 squeezes Pixtral's single row away; the tiny Gemma 4 has 64 places for patches a side.
    if (family == "mistral3" and size == (1, 1)) or (family == "gemma4" and max(size) > 2 * min(size)):
        with pytest.raises(MediaError, match=r"request .* the image tower refused"):
            assert_rows_match(family, size)
    else:
        assert_rows_match(family, size)


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "mistral3", "gemma3", "llava_next"]
)
@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(width=st.integers(15, 420), height=st.integers(15, 420))  # one row of Pixtral's fails in transformers 5.24
def test_one_count_for_placeholders_and_rows(family, width, height):
    """Whatever the size, the prompt holds as many placeholders as the tower makes rows (B4)."""
    try:
        assert_rows_match(family, (width, height))
    except MediaError as error:
        assert "aspect ratio" in str(error)


@torch.inference_mode()
def test_padding_between_pictures_of_other_sizes_reaches_no_row():
    """Pixtral's processor pads pictures to the largest of a request: the rows equal those of each alone (C10)."""
    pictures = [checkpoints.picture(0, (32, 48)), checkpoints.picture(1, (64, 16))]
    prepared, sequence = merged("mistral3", pictures)
    each_is_as_alone("mistral3", pictures, prepared, sequence)


@pytest.mark.parametrize("family", ["smolvlm", "internvl", "perception_lm", "aya_vision", "lfm2_vl", "minicpmv4_6"])
def test_tiles_are_counted_as_the_processor_cuts_them(family):
    """Never zero, also below the size of a tile; a 1 x 1 picture that is scaled up counts in full."""
    intake = loaded(family)[3]
    for size in ((1, 1), (20, 20), (56, 56), (112, 84)):
        prepared = intake.prepare(Request(prompt="x", images=[checkpoints.picture(0, size)]))
        assert rows(prepared.media[0].runs) == (prepared.input_ids == intake.placeholders["image"]).sum() > 0


def test_pictures_are_cut_as_the_processor_is_told_at_loading():
    with Prefiller.from_pretrained(
        checkpoints.cached("smolvlm"), processor_kwargs={"do_image_splitting": False}
    ) as engine:
        whole = engine.prefill("x", images=[PICTURE])
    cut = loaded("smolvlm")[3].prepare(Request(prompt="x", images=[PICTURE]))
    assert sum(b - a for a, b in whole.spans[0]) == 4 < sum(b - a for a, b in cut.media[0].runs)


# Settings


def test_max_pixels_at_loading_is_what_the_processor_makes_of_it():
    folder, big = checkpoints.cached("qwen2_vl"), checkpoints.picture(0, (900, 900))
    grids = []
    for options in ({"max_pixels": 100_000}, {"size": {"shortest_edge": 3136, "longest_edge": 100_000}}):
        bundle = load(folder, processor_kwargs=options)
        intake = Intake(bundle.processor, loaded("qwen2_vl")[2].placeholders, PrefillConfig(), 8192)
        grids.append(intake.prepare(Request(prompt="x", images=[big])).inputs["image_grid_thw"].tolist())
    assert grids == [[[1, 22, 22]]] * 2
    stock = loaded("qwen2_vl")[1].image_processor([big], size={"shortest_edge": 3136, "longest_edge": 100_000})
    assert torch.as_tensor(stock["image_grid_thw"]).tolist() == grids[0]


@pytest.mark.parametrize("options", [{"max_pixels": 100, "min_pixels": 5000}, {"max_pixels": 100}])
def test_contradicting_pixel_limits_are_refused(options):
    with pytest.raises(ModelError, match="smallest size"):
        load(checkpoints.cached("qwen2_vl"), processor_kwargs=options)


@pytest.fixture
def edited(tmp_path):
    """A copy of a checkpoint with some settings changed; None takes one out."""

    def copy(family, model=(), processor=()):
        shutil.copytree(checkpoints.cached(family), tmp_path / family)
        for name, changes in (("config.json", model), ("processor_config.json", processor)):
            file = tmp_path / family / name
            settings = {**json.loads(file.read_text()), **dict(changes)}
            file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        return tmp_path / family

    return copy


ROW_SETTINGS = ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens")


@pytest.mark.parametrize("family", ["llava_clip", "llava_siglip", "llava_next"])
def test_rows_are_counted_by_the_models_settings_where_the_processor_has_none(edited, family):
    """Processors saved before transformers 4.47 do not say how many rows a picture has (B6)."""
    old = edited(family, processor=dict.fromkeys(ROW_SETTINGS))
    request = Request(prompt="what is it?", images=[PICTURE])
    whole = engines.cold(family).prefill(request)
    with Prefiller.from_pretrained(old) as engine:
        assert torch.equal(engine.prefill(request).next_token_logits, whole.next_token_logits)


@pytest.mark.parametrize("side", ["model", "processor"])
def test_another_selection_of_features_in_model_and_processor_is_refused_at_loading(edited, side):
    """One counts the class token and the other does not: every picture would be a row off (B6)."""
    with pytest.raises(ModelError, match=r"'full'.*'default'|'default'.*'full'"):
        load(edited("llava_clip", **{side: {"vision_feature_select_strategy": "full"}}))


@torch.inference_mode()
def test_the_full_selection_of_features(edited):
    """Supported where a picture is one row of tokens, and refused at loading where tiles are laid out (B8)."""
    full = {"vision_feature_select_strategy": "full"}
    folder = edited("llava_clip", full, full)
    with Prefiller.from_pretrained(folder) as engine:
        result = engine.prefill("what is it?", images=[PICTURE])
        model, prepared = (
            checkpoints.load(folder)[0],
            engine.intake.prepare(Request(prompt="what is it?", images=[PICTURE])),
        )
    assert (result.next_token_logits - model(**prepared.inputs).logits[0, -1]).abs().max() < 1e-4
    assert sum(map(rows, result.spans)) == 10  # 3 x 3 patches and the class token
    with pytest.raises(ModelError, match="class token"):
        load(edited("llava_next", full, full))


def test_a_setting_that_the_config_does_not_know_is_a_model_error(edited):
    with pytest.raises(ModelError, match="vision_feature_select_strategy"):
        load(edited("llava_clip", {"vision_feature_select_strategy": "none"}))


# Batches


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "smolvlm", "llava_onevision"])
def test_requests_with_and_without_media_in_one_batch_equal_each_alone(family):
    pictures = [checkpoints.picture(i, (64, 48)) for i in range(3)]
    requests = [
        Request(prompt="one", images=pictures[:1]),
        Request(prompt="no picture at all"),
        Request(prompt="two", images=pictures[1:]),
        Request(id="bad", prompt="broken", images=[b"no picture"]),
        Request(prompt="one, again", images=pictures[:1]),
        *([request_of(MIXTURES["one video"])] if family in VIDEO else []),
    ]
    with engines.open_prefiller(family) as engine:
        together = engine.prefill_many(requests)
        for request, result in zip(requests, together, strict=True):
            if request.id == "bad":
                assert isinstance(result, MediaError)
                assert "request 'bad', picture 1" in str(result)
            else:
                alone = engine.prefill(request).next_token_logits
                assert (result.next_token_logits - alone).abs().max() < 1e-4


def test_a_picture_past_the_models_ratio_fails_alone():
    with engines.open_prefiller("qwen2_vl") as engine:
        edge, past = engine.prefill_many(
            [Request(prompt="x", images=[checkpoints.picture(0, size)]) for size in ((600, 3), (603, 3))]
        )
    assert edge.next_token_logits.isfinite().all()
    assert isinstance(past, MediaError)
    assert "603 x 3" in str(past)


@torch.inference_mode()
def test_rows_that_do_not_match_the_placeholders_are_refused():
    _, _, described, intake = loaded("llava_clip")
    prepared = intake.prepare(Request(id="r", prompt="x", images=[PICTURE]))
    output = encoded(described, prepared)["image"]
    output["pooler_output"] = [row[:-1] for row in output["pooler_output"]]
    with pytest.raises(PlaceholderError, match="'r': 9 image placeholder tokens but the image tower made 8 rows"):
        merge.merge(described, prepared, {"image": output})
