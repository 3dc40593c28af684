# Finetune a pretrained model on Shakespeare: OpenAI's GPT-2 XL, as in nanoGPT, or another one.
#
#   data     python prepare.py shakespeare   (1.1 MB, a download; GPT-2's tokens)
#   launch   python train.py config/finetune_shakespeare.py
#            python train.py config/finetune_shakespeare.py --init_from=gpt2   (124M, if XL is too large)
#   other    a Llama-like model with its own tokenizer, from a folder or the Hub:
#            python prepare.py shakespeare_smol --input=data/shakespeare/input.txt \
#                --tokenizer=hf:HuggingFaceTB/SmolLM2-135M
#            python train.py config/finetune_shakespeare.py --init_from=HuggingFaceTB/SmolLM2-135M \
#                --dataset=shakespeare_smol
#   batch    1 sequence x 1,024 tokens x 32 micro-batches = 32,768 tokens per iteration; 20 iterations are
#            2.2 epochs
#   cost     minutes on a GPU
#   loss     compare with the validation loss of the first step

out_dir = 'out-shakespeare'
dataset = 'shakespeare'
init_from = 'gpt2-xl'

batch_size = 1
block_size = 1024
gradient_accumulation_steps = 32

max_iters = 20
learning_rate = 3e-5
decay_lr = False  # a constant learning rate; others: --decay_lr=True --warmup_iters=2

eval_interval = 5
eval_iters = 40
log_interval = 1
always_save_checkpoint = False  # only when the validation loss improves

wandb_project = 'shakespeare'
wandb_run_name = 'finetune'
