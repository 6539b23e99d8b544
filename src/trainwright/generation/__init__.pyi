from trainwright.generation.continuations import generate as generate
