"""What a scheduler compiles grammars with: the model's tokens, as its tokenizer spells them."""

from lockstep.worker.config import WorkerConfig
from lockstep.worker.grammars.compiler import GrammarCompiler
from lockstep.worker.grammars.grammar import is_installed
from lockstep.worker.grammars.vocabulary import Vocabulary


def create_compiler(config: WorkerConfig) -> GrammarCompiler | None:
    """For the scheduler of an engine; None where the optional library is missing."""
    return GrammarCompiler(lambda: _vocabulary(config)) if is_installed() else None


def _vocabulary(config: WorkerConfig) -> Vocabulary:
    """Raises ValueError: a file of the tokenizer is missing or damaged; names it."""
    from lockstep.launcher.tokenize import load_tokenizer

    tokenizer = load_tokenizer(config.tokenizer_path)
    tokens = [tokenizer.token_bytes(token_id) for token_id in range(config.model.vocab_size)]
    return Vocabulary(tokens, tokenizer.special_ids)
