"""The tests' own tokenizer."""

from transformers import AutoTokenizer

from tests.tiny import SPECIAL, WORDS, save_tiny, tiny_tokenizer

TEXT = "<|user|> What is 1 + 2 ? Answer: the answer #### 33 so. some 12,5 <|end|>"


def test_a_saved_tokenizer_keeps_every_word(tmp_path):
    """AutoTokenizer takes Qwen2Tokenizer for a qwen2 whatever the folder says; words of several letters were lost."""
    made, read = tiny_tokenizer(), AutoTokenizer.from_pretrained(save_tiny(tmp_path))
    words = [*SPECIAL, *WORDS]
    expected = [4, *map(words.index, ["What", "is", "1", "+", "2", "?", "Answer:", "the", "answer", "####"])]
    assert made(TEXT)["input_ids"][: len(expected)] == expected
    assert read(TEXT)["input_ids"] == made(TEXT)["input_ids"]
    assert read.convert_tokens_to_ids(words) == [*range(len(words))]
    assert read.get_chat_template() == made.get_chat_template()
