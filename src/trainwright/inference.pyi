from trainwright.bigmodels.pipeline import prepare_pippy as prepare_pippy
