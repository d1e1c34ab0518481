"""tokenizer.json like those of model families, learned by the library from a short story."""

import functools
import json

from distgpt.core.data.tokenizers import load_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizing import STORY

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def _byte_level(before, special, normalizer=None):
    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = before, decoders.ByteLevel()
    if normalizer is not None:
        library.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([STORY], trainer)
    library.add_special_tokens([AddedToken(text, special=True) for text in special])
    return library


def _split(digits):
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS % digits), "isolated"), parts])


def llama3():
    library = _byte_level(_split("{1,3}"), LLAMA3)
    begin = library.token_to_id(LLAMA3[0])
    template = processors.TemplateProcessing(
        single=f"{LLAMA3[0]} $A", pair=f"{LLAMA3[0]} $A $B", special_tokens=[(LLAMA3[0], begin)]
    )
    library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return json.loads(library.to_str())


def qwen():
    """Qwen 2.5 and 3 compose text (NFC) and split off <think>, which is not a special token."""
    library = _byte_level(_split(""), CHATML, normalizers.NFC())
    library.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return json.loads(library.to_str())


def smollm2():
    digits = pre_tokenizers.Digits(individual_digits=True)
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return json.loads(_byte_level(pre_tokenizers.Sequence([digits, parts]), CHATML).to_str())


def _sentencepiece(library):
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    library.decoder = decoders.Sequence(parts)
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special + bytes_, show_progress=False)
    library.train_from_iterator([STORY], trainer)
    template = {"single": "<s> $A", "pair": "<s> $A $B", "special_tokens": [("<s>", 1)]}
    library.post_processor = processors.TemplateProcessing(**template)
    document = json.loads(library.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    return document


def tinyllama():
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return _sentencepiece(library)


def mistral():
    library = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return _sentencepiece(library)


FAMILIES = {each.__name__: each for each in (llama3, qwen, smollm2, tinyllama, mistral)}


@functools.cache
def document(family):
    return json.dumps(FAMILIES[family](), ensure_ascii=False)


def write_family(folder, family, **settings):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(document(family), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return load_tokenizer(str(folder))
