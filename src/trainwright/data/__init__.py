"""Data: the order of samples, sharding over ranks and workers, resuming at any position, and data modules."""

from typing import NoReturn

from trainwright.core.names.foreign_names import missing
from trainwright.data.combined import CombinedLoader
from trainwright.data.datamodule import DataModule
from trainwright.data.groups import iterate_groups, resolve_limit
from trainwright.data.iterable import ShardedIterable, shard_info
from trainwright.data.loader import prepare_loader
from trainwright.data.loader_options import LoaderOptions
from trainwright.data.order import KeyedPermutation, SequentialOrder, ShuffledOrder, epoch_key
from trainwright.data.padding import pad_to, trim
from trainwright.data.prepared import PreparedLoader
from trainwright.data.sampler import BatchShard, ShardedBatchSampler
from trainwright.data.tokens.masking import MaskedSpans, MaskedTokens
from trainwright.data.tokens.token_dataset import TokenDataset
from trainwright.data.tokens.token_file import TokenFile, TokenFileWriter
from trainwright.data.tokens.tokenize import load_tokenizer, tokenize_files

__all__ = [
    "BatchShard",
    "CombinedLoader",
    "DataModule",
    "KeyedPermutation",
    "LoaderOptions",
    "MaskedSpans",
    "MaskedTokens",
    "PreparedLoader",
    "SequentialOrder",
    "ShardedBatchSampler",
    "ShardedIterable",
    "ShuffledOrder",
    "TokenDataset",
    "TokenFile",
    "TokenFileWriter",
    "epoch_key",
    "iterate_groups",
    "load_tokenizer",
    "pad_to",
    "prepare_loader",
    "resolve_limit",
    "shard_info",
    "tokenize_files",
    "trim",
]


def __getattr__(name: str) -> NoReturn:
    raise missing(__name__, name, __all__)
