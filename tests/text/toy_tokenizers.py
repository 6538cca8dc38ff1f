"""Small tokenizers of every decoder kind, built in memory: what the laws of text are checked against."""

from __future__ import annotations

from functools import cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from engine.loading.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It doesn't mind, does it? No!",
    "a    b  c\n\n\tdef f(x):\n        return x  # done\n",
    "漢字かな交じり文とカタカナ。中文字符也在这里，한국어도 있습니다.",
    "🎉 é 漢字 👨‍👩‍👧 ∑ naïve café – “quotes” … 🇩🇪 👍🏽",
    "STOP STOPPED stopping the stop; END of ENDING. <tool> </tool> ### User: ### Assistant:",
]
SPECIAL = ["<s>", "</s>", "<|im_end|>"]


def _special(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("été ", normalized=False)])
    return backend


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _special(backend)


def byte_fallback() -> tokenizers.Tokenizer:
    """Llama's kind: visible spaces, one token for each byte, a leading space that decoding strips."""
    words = ["▁the", "▁", "a", "b", "é", "漢", "▁STOP", "END", "st", "op", ".", "▁▁▁▁", "\n", "�", "o", "t", "h", "e"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocab.setdefault("th", len(vocab))
    vocab.setdefault("the", len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _special(backend)


def word_piece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[SEP]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _special(backend)


def metaspace() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=220, unk_token="<unk>", special_tokens=["<unk>"])
    )
    return _special(backend)


def suffixed() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.BPEDecoder()
    trainer = trainers.BpeTrainer(vocab_size=260, end_of_word_suffix="</w>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return _special(backend)


def undecoded() -> tokenizers.Tokenizer:
    backend = byte_fallback()
    backend.decoder = None
    return backend


KINDS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "word_piece": word_piece,
    "metaspace": metaspace,
    "suffixed": suffixed,
    "undecoded": undecoded,
}


@cache
def toy(kind: str, padding: int = 8) -> Tokenizer:
    """The tokenizer of a kind, with a model vocabulary ``padding`` ids larger than its own."""
    backend = KINDS[kind]()
    return Tokenizer(backend, vocab_size=backend.get_vocab_size() + padding)
