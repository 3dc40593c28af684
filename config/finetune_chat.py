# Finetuning on conversations: a model that continues texts learns to answer.
#
#   data     python prepare.py chats.json --chat --tokenizer=data/DATASET_OF_THE_RUN
#            (for GPT-2: --tokenizer=gpt2; for SmolLM2: --tokenizer=hf:HuggingFaceTB/SmolLM2-135M)
#   launch   python train.py config/finetune_chat.py --dataset=chats --init_from=out
#            or --init_from=gpt2, --init_from=HuggingFaceTB/SmolLM2-135M
#   talk     python sample.py --out_dir=out-chat --chat
#   batch    16 windows of whole conversations; of 1,024 tokens each at most 16,384 tokens per iteration, of
#            which those count that the assistant writes
#   cost     two epochs. A small model of one's own wants more, and larger steps: docs/chat.md
#   loss     not measured for large models; a small one on a made-up task: dev/results.md

out_dir = 'out-chat'
dataset = 'chats'
init_from = 'out'

# block_size: the model's, at most 1,024
batch_size = 16
gradient_accumulation_steps = 1

max_epochs = 2
learning_rate = 3e-5
weight_decay = 0.0
warmup_iters = 0
lr_schedule = 'linear'

eval_interval = 100
eval_iters = 20
log_interval = 10
