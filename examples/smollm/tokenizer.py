"""Makes the tokenizer of SmolLM2 from the vocabulary and the merges of its GGUF file, and writes conversations."""

from weights import FileError, need

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_TEMPLATE = "<|im_start|>", "<|im_end|>"
_CONTROL = 3  # the type of these tokens


class Tokenizer:
    """Maps texts to tokens and back. `end` is the token that ends an answer."""

    def __init__(self, file):
        tokenizers = need("tokenizers")
        kind = file.field("tokenizer.ggml.model", str), file.field("tokenizer.ggml.pre", str)
        if kind != ("gpt2", "smollm"):
            raise FileError(f"{file.path} has a tokenizer of kind {'/'.join(kind)}; gpt2/smollm is known")
        tokens, types = (
            file.field("tokenizer.ggml.tokens", str, many=True),
            file.field("tokenizer.ggml.token_type", int, many=True),
        )
        control = [token for token, kind in zip(tokens, types) if kind == _CONTROL]
        self.size, self.end = len(tokens), file.field("tokenizer.ggml.eos_token_id", int)
        if not set(_TEMPLATE) <= set(control) or not 0 <= self.end < self.size:
            raise FileError(f"{file.path} must have {' and '.join(_TEMPLATE)}, and a token that ends an answer")
        merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges", str, many=True)]
        try:
            model = tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, merges)
        except Exception as error:  # tokenizers has no class of its own for what it refuses
            raise FileError(f"{file.path} has a damaged vocabulary: {error}") from error
        self._tokenizer = tokenizers.Tokenizer(model)
        parts = tokenizers.pre_tokenizers
        self._tokenizer.pre_tokenizer = parts.Sequence(
            [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
        )
        self._tokenizer.decoder = tokenizers.decoders.ByteLevel()
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in control])
        self._plain = tokenizers.Tokenizer(model)  # knows no control tokens, so that what users type cannot be one
        self._plain.pre_tokenizer = self._tokenizer.pre_tokenizer

    def encode(self, text, control=False):
        """Returns the tokens of a text, where <|im_end|> and so on are control tokens only if `control`."""
        return (self._tokenizer if control else self._plain).encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def message(self, role, text):
        """Returns the tokens of a message of "system", "user" or "assistant"."""
        header, end = self.encode(f"<|im_start|>{role}\n", control=True), self.encode("<|im_end|>\n", control=True)
        return [*header, *self.encode(text), *end]

    def question(self, text, first):
        """Returns the tokens of a question and of the beginning of its answer; the first has SmolLM2's introduction."""
        system = self.message("system", SYSTEM) if first else []
        return [*system, *self.message("user", text), *self.encode("<|im_start|>assistant\n", control=True)]


class Stream:
    """Turns tokens into text as they come. Characters of several tokens come out when they are whole."""

    def __init__(self, tokenizer):
        self._tokenizer, self._tokens = tokenizer, []

    def add(self, token):
        """Returns the new text, which may be empty."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        if text.endswith("\ufffd") and len(self._tokens) < 8:
            return ""
        self._tokens = []
        return text
