# Llama 2's largest network (69 billion parameters), for its plan: what it takes on GPUs that need not be
# here. No file of this project has trained it.
#
#   data     none is needed for the plan, which then assumes GPT-2's 50,304 ids; for the run a large set as
#            data/fineweb_edu, or --dataset=NAME
#   launch   python plan.py config/plan_llama_70b.py --world_size=512 --gpu_memory=80 --peak_flops=989e12
#   batch    1 sequence x 4,096 tokens x 2 micro-batches x 512 GPUs = 4,194,304 tokens per iteration
#   budget   2 trillion tokens = 476,838 iterations, 29 tokens per parameter
#   memory   see the plan: an estimate, not measured by us
#   host     each process builds 277 GB before it keeps its share: 2.2 TB of main memory in a machine of
#            eight GPUs
#   cost     68 days on 512 H100 at 40% of their peak, a quarter of them for activation_checkpointing.
#            Arithmetic; not measured by us
#   loss     not measured by us

out_dir = 'out-llama-70b'
dataset = 'fineweb_edu'
wandb_project = 'llama'
wandb_run_name = 'llama-70b'

arch = 'llama'
bias = False
n_layer, n_head, n_kv_head, n_embd = 80, 64, 8, 8192
mlp_width = 28672
shard = 0
activation_checkpointing = True

batch_size = 1
block_size = 4096
gradient_accumulation_steps = 1024

budget = "2e12 tokens"
learning_rate = 1.5e-4
min_lr = 1.5e-5
warmup_iters = 2000
weight_decay = 1e-1

eval_interval = 1000
eval_iters = 512
log_interval = 10
