# page docs/lora.md
# with steps=1 prompts_per_step=2 group_size=2 rollout.shards=2 rollout.engine=transformers
refrain grpo smollm2-arithmetic lora.rank=16 train.learning_rate=2e-4
# page docs/algorithms.md
# with steps=1 prompts_per_step=2 group_size=2 rollout.shards=2 rollout.engine=transformers
refrain distill smollm2-arithmetic teachers.demo.version=RUN
# page docs/lora.md
refrain export RUN --to FOLDER
