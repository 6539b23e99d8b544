from trainwright.generation.cache import KeyValueCache as KeyValueCache
from trainwright.generation.continuations import generate as generate
