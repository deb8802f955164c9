"""Makes a language model's tokenizer from its GGUF file, and writes conversations as the file's template says."""

import re
from datetime import datetime

from weights import FileError, need

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens
# A text is split into these before the merges, as the tokenizer.json of Qwen2 and of Llama 3 say.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}DIGITS",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
_DIGITS = {"qwen2": "", "llama-bpe": "{1,3}"}  # how many of them are a word


class Tokenizer:
    """Maps texts to tokens and back. `ends` are the tokens that end an answer."""

    def __init__(self, file):
        tokenizers = need("tokenizers")
        kind = file.field("tokenizer.ggml.model", str), file.field("tokenizer.ggml.pre", str)
        if kind not in [("gpt2", name) for name in ("smollm", *_DIGITS)]:
            known = ", ".join(("smollm", *_DIGITS))
            raise FileError(f"{file.path} has a tokenizer of kind {'/'.join(kind)}; gpt2 with {known} is known")
        tokens = file.field("tokenizer.ggml.tokens", str, many=True)
        types = file.field("tokenizer.ggml.token_type", int, many=True)
        self._path, self.size = file.path, len(tokens)
        self.ends = {file.field("tokenizer.ggml.eos_token_id", int)}
        self.ends |= {file.field("tokenizer.ggml.eot_token_id", int, absent=end) for end in self.ends}
        first = file.field("tokenizer.ggml.bos_token_id", int, absent=-1)
        if not all(0 <= end < self.size for end in self.ends) or not -1 <= first < self.size:
            raise FileError(f"{file.path} must have a token that begins a text, and one that ends an answer")
        merges = [tuple(merge.split(" ", 1)) for merge in file.field("tokenizer.ggml.merges", str, many=True)]
        numbers = {token: i for i, token in enumerate(tokens)}
        try:
            model = tokenizers.models.BPE(numbers, merges, ignore_merges=kind[1] == "llama-bpe")
        except Exception as error:  # tokenizers has no class of its own for what it refuses
            raise FileError(f"{file.path} has a damaged vocabulary: {error}") from error
        # The second knows no control tokens, so that what users type cannot be one.
        self._tokenizer, self._plain = tokenizers.Tokenizer(model), tokenizers.Tokenizer(model)
        parts = tokenizers.pre_tokenizers
        if kind[1] == "smollm":
            words = [parts.Digits(individual_digits=True), parts.ByteLevel(add_prefix_space=False)]
        else:
            pattern = tokenizers.Regex("|".join(_WORDS).replace("DIGITS", _DIGITS[kind[1]]))
            words = [parts.Split(pattern, "isolated"), parts.ByteLevel(add_prefix_space=False, use_regex=False)]
        for tokenizer in (self._tokenizer, self._plain):
            tokenizer.pre_tokenizer = parts.Sequence(words)
            tokenizer.decoder = tokenizers.decoders.ByteLevel()
            if kind[1] == "qwen2":
                tokenizer.normalizer = tokenizers.normalizers.NFC()
            others = [token for token, kind in zip(tokens, types) if kind == _USER_DEFINED]
            tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in others])
        control = [token for token, kind in zip(tokens, types) if kind == _CONTROL]
        self._tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in control])
        begins = file.field("tokenizer.ggml.add_bos_token", bool, absent=False) and first >= 0
        self._first = [first] if begins else []
        self._template = _template(file)
        self._names = dict(bos_token=tokens[first] if first >= 0 else "", eos_token=tokens[min(self.ends)])

    def encode(self, text, control=False):
        """Returns the tokens of a text, where <|im_end|> and so on are control tokens only if `control`."""
        return (self._tokenizer if control else self._plain).encode(text, add_special_tokens=False).ids

    def decode(self, tokens):
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def conversation(self, messages):
        """Returns the tokens of a conversation and of the beginning of the next answer. A message is (role, content),
        and the content is a text, or tokens, as they were read or written before."""
        # The template sees a sign for each content: what is in a text is nothing to it.
        signs = [dict(role=role, content=f"\ue000{i}\ue001") for i, (role, _) in enumerate(messages)]
        try:
            text = self._template.render(messages=signs, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template is a program
            raise FileError(f"{self._path}: the template of conversations fails: {error}") from error
        parts = re.split("\ue000([0-9]+)\ue001", text)
        if list(map(int, parts[1::2])) != list(range(len(messages))):
            raise FileError(f"{self._path}: the template of conversations leaves out what was said, or says it twice")
        contents = [content if isinstance(content, list) else self.encode(content) for _, content in messages]
        tokens = self.encode(parts[0], control=True)
        for content, part in zip(contents, parts[2::2]):
            tokens += [*content, *self.encode(part, control=True)]
        return tokens if tokens[:1] == self._first else self._first + tokens


def _template(file):
    """Returns the Jinja template of conversations, with the functions and the settings that transformers gives them."""
    need("jinja2")
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(
        raise_exception=refuse, strftime_now=lambda form: datetime.now().astimezone().strftime(form)
    )
    try:
        return environment.from_string(file.field("tokenizer.chat_template", str))
    except TemplateError as error:
        raise FileError(f"{file.path} has a damaged template of conversations: {error}") from error


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
