from trainwright.accelerator.local_sgd_block import LocalSGD as LocalSGD
