"""Images of rows: read, decoded, put into messages at their markers, and given to a processor."""

import io
import json
from dataclasses import replace

import pytest
import torch
from PIL import Image

from perl.adapters.merge import merge_adapter
from perl.base.errors import UserError
from perl.models import folders
from perl.models.images import decoded, filled, fitted, has_images, load_processing, read_images, tokenizer_of
from perl.models.pixels import ImageInputs, image_arguments, image_inputs
from perl.prompts import build_messages, encode
from perl.tasks import TASKS, load_problems
from perl.tasks.trained import problem_hash
from tests.tiny import VISION_TOKENS, geometry_file, geometry_rows, noise_png, save_tiny, save_tiny_vision
from tests.trainers import move_adapter

VERLS = (
    "<image>Find x. You FIRST think about the reasoning process as an internal monologue and then provide the final"
    " answer. The reasoning process MUST BE enclosed within <think> </think> tags. The final answer MUST BE put in"
    r" \boxed{}."
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def processor(folder):
    return load_processing(folder)


def pixels(file):
    image = decoded(file)
    return image.size, image.tobytes()


def test_an_image_is_the_same_however_a_row_holds_it(tmp_path):
    png = noise_png(16, 24)
    (tmp_path / "a.png").write_bytes(png)
    stored = {"bytes": png, "path": None}, {"bytes": None, "path": str(tmp_path / "a.png")}, png
    for image in (*stored, str(tmp_path / "a.png"), Image.open(io.BytesIO(png))):
        (file,) = read_images({"images": [image]}, "a:1")
        assert pixels(file) == pixels(png)
        for empty in ({}, {"images": None}, {"images": []}, {"images": ""}):
            assert read_images(empty | {"image": image}, "a:1") == (file,)
    assert read_images({"images": []}, "a:1") == read_images({"images": None}, "a:1") == read_images({}, "a:1") == ()


def test_an_image_of_a_mode_that_png_has_not_is_read_as_rgb_or_is_one_line():
    for mode in ("CMYK", "YCbCr"):
        image = Image.new("RGB", (8, 8), (255, 0, 0)).convert(mode)
        (file,) = read_images({"images": [image]}, "train:1")
        assert decoded(file).getpixel((0, 0)) == image.convert("RGB").getpixel((0, 0))
    with pytest.raises(UserError, match=r"^train:1: image 1: cannot write mode F as PNG; store it as RGB, or as the"):
        read_images({"image": Image.new("F", (8, 8))}, "train:1")


def test_an_image_of_more_pixels_than_pil_opens_is_one_line(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # its own limit is 89 million
    with pytest.raises(UserError, match=r"^a:1: image 1 can't be decoded: Image size"):
        read_images({"images": [noise_png(16, 24)]}, "a:1")


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"bytes": noise_png(16, 24)[:100], "path": None}, "train.parquet:3: image 2 can't be decoded: "),
        ({"bytes": b"no image", "path": None}, "train.parquet:3: image 2 can't be decoded: cannot identify image file"),
        ("nowhere.png", "train.parquet:3: image 2: nowhere.png: No such file or directory; a path counts from"),
        ("a\0.png", "train.parquet:3: image 2: 'a\\x00.png' is no path: embedded null byte"),
        (7, "train.parquet:3: image 2: 7 is no image; write {bytes, path}, bytes or a path"),
        ({"bytes": None, "path": None}, "train.parquet:3: image 2: None is no image; write"),
    ],
)
def test_a_broken_image_is_one_line_that_names_the_row(image, message):
    with pytest.raises(UserError) as error:
        read_images({"images": [noise_png(8, 8), image]}, "train.parquet:3")
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_markers_become_image_parts_at_their_places():
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "<image>left <image> right"}]
    files = [noise_png(8, 8, 1), noise_png(16, 8, 2)]
    found = fitted(messages, files, True, "a:1")
    image = {"type": "image"}
    user = [image, {"type": "text", "text": "left "}, image, {"type": "text", "text": " right"}]
    assert found == [
        {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
        {"role": "user", "content": user},
    ]
    with_files = filled(found, files)[1]["content"]
    assert [part["image"].size for part in with_files if part["type"] == "image"] == [(8, 8), (16, 8)]


def test_texts_for_a_model_of_texts_stay_as_they_are():
    messages = [{"role": "user", "content": "What does <image> mean in HTML?"}]
    assert fitted(messages, (), False, "a:1") == messages


@pytest.mark.parametrize(
    ("text", "images", "takes", "message"),
    [
        ("<image> and <image>", 1, True, "a:1: 2 <image> in the prompt, but 1 image(s); write one <image> for each"),
        ("no marker", 1, True, "a:1: 0 <image> in the prompt, but 1 image(s)"),
        ("<image> alone", 0, True, "a:1: 1 <image> in the prompt, but 0 image(s)"),
        ("<image>", 1, False, "a:1: the row has 1 image(s), but the model takes texts only; name a model that takes"),
    ],
)
def test_images_are_never_dropped(text, images, takes, message):
    with pytest.raises(UserError) as error:
        fitted([{"role": "user", "content": text}], [noise_png(8, 8)] * images, takes, "a:1")
    assert str(error.value).startswith(message)


def test_geometry3k_raw_and_from_verl_ask_the_same(tmp_path):
    import pyarrow
    import pyarrow.parquet

    image = {"bytes": noise_png(16, 24), "path": None}
    raw = {"images": [image], "problem": "<image>Find x.", "answer": r"3 \sqrt { 10 }"}
    verl = {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": VERLS}],
        "images": [image],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": r"3 \sqrt { 10 }"},
        "extra_info": {"split": "train", "index": 0},
    }
    problems = []
    for name, row in (("raw", raw), ("verl", verl)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / f"{name}.parquet")
        problems += load_problems(str(tmp_path / f"{name}.parquet"), task="geometry3k" if name == "raw" else None)
    style = TASKS["geometry3k"].style
    asked = [build_messages(problem, style) for problem in problems]
    assert asked[0] == asked[1] == [{"role": "user", "content": VERLS}]
    assert [p.images for p in problems] == [(image["bytes"],)] * 2
    assert [p.task for p in problems] == ["geometry3k"] * 2
    assert [p.gold for p in problems] == [r"3 \sqrt { 10 }"] * 2
    assert [p.data_source for p in problems] == ["hiyouga/geometry3k"] * 2


def test_problems_that_differ_in_their_image_alone_are_two(tmp_path):
    (problem, *_) = load_problems(str(geometry_file(tmp_path / "train.parquet")))
    other = replace(problem, images=(noise_png(16, 24, seed=99),))
    assert problem_hash(problem) != problem_hash(other)


def test_a_text_problem_keeps_its_hash():
    """Results of earlier versions are found again by it."""
    import hashlib

    (problem,) = load_problems_of({"question": "What is 1 + 2 ?", "answer": "#### 3"})
    content = json.dumps(["What is 1 + 2 ?", None, "3"], ensure_ascii=False)
    assert problem_hash(problem) == hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def load_problems_of(row):
    from perl.tasks import problem_of_row

    return [problem_of_row(row, "a:1", None)]


def test_a_prompt_has_as_many_tokens_as_the_model_sees_of_its_images(processor):
    """An image of 24 x 16 pixels is 6 x 4 patches of 4 x 4, of which four make a token."""
    files = [noise_png(24, 16, 1), noise_png(8, 16, 2)]
    messages = fitted([{"role": "user", "content": "<image> so <image>"}], files, True, "a:1")
    ids = encode(processor, messages, files)
    start, end, image, _ = tokenizer_of(processor).convert_tokens_to_ids(VISION_TOKENS)
    so = tokenizer_of(processor).convert_tokens_to_ids("so")
    places = [start, *[image] * 6, end, so, start, *[image] * 2, end]
    assert [i for i in ids if i in {start, end, image, so}] == places
    inputs = image_inputs(processor, files)
    assert inputs.grids.tolist() == [[1, 4, 6], [1, 4, 2]]
    assert inputs.pixel_values.shape == (24 + 8, 3 * 2 * 4 * 4)


def test_a_model_of_texts_has_its_tokenizer(tmp_path, processor):
    tokenizer = load_processing(save_tiny(tmp_path))
    assert not has_images(tokenizer)
    assert tokenizer_of(tokenizer) is tokenizer
    assert has_images(processor)


def test_images_of_rows_are_put_together():
    """Grids of 4, 6 and 2 patches; the rows have two, none and one of these images."""
    grids = torch.tensor([[1, 2, 2], [1, 2, 3], [1, 1, 2]])
    pixel_values = torch.arange(12.0)[:, None]
    first, last = ImageInputs(pixel_values[:10], grids[:2]), ImageInputs(pixel_values[10:], grids[2:])

    class Config:
        image_token_id = 5

    ids = torch.tensor([[0, 5, 5, 3], [0, 0, 1, 2], [0, 3, 5, 1]])
    arguments = image_arguments([first, None, last], ids, Config)
    assert torch.equal(arguments["pixel_values"], pixel_values)
    assert torch.equal(arguments["image_grid_thw"], grids)
    assert arguments["mm_token_type_ids"].tolist() == [[0, 1, 1, 0], [0, 0, 0, 0], [0, 0, 1, 0]]
    assert image_arguments([None, None], ids, Config) == {}


def test_without_its_image_processor_a_model_is_one_line(folder, tmp_path):
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(UserError) as error:
        load_processing(tmp_path, "--model")
    assert str(error.value).startswith(f"--model {tmp_path}: the model's image processor cannot be loaded: ")
    assert "\n" not in str(error.value)


def test_merged_weights_go_where_the_files_have_them(folder, tmp_path):
    """The hub's Qwen2.5-VL calls model.layers what transformers calls model.language_model.layers."""
    from peft import LoraConfig, get_peft_model

    model = folders.load_model(folder)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "qkv"], task_type="CAUSAL_LM"))
    move_adapter(wrapped, 0.1)
    wrapped.save_pretrained(tmp_path / "adapter")
    report = merge_adapter(folder, tmp_path / "adapter", tmp_path / "merged")
    assert report.tensors == 4  # q_proj of two layers of the language model, qkv of two of the vision tower
    base, merged = folders.Checkpoint(folder), folders.Checkpoint(tmp_path / "merged")
    assert base.location == merged.location
    changed = {name for name in base.location if not torch.equal(base.read(name), merged.read(name))}
    assert changed == {f"model.layers.{i}.self_attn.q_proj.weight" for i in (0, 1)} | {
        f"visual.blocks.{i}.attn.qkv.weight" for i in (0, 1)
    }
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file()
    (row,) = geometry_rows([1])
    processor, file = load_processing(tmp_path / "merged"), row["images"][0]["bytes"]
    messages = fitted(row["prompt"], [file], True, "a:1")
    ids = torch.tensor([encode(processor, messages, [file])])
    arguments = {"input_ids": ids} | image_arguments([image_inputs(processor, [file])], ids, model.config)
    with torch.no_grad():
        ours = folders.load_model(tmp_path / "merged").eval()(**arguments).logits
        assert torch.allclose(ours, wrapped.eval()(**arguments).logits, atol=1e-4)
