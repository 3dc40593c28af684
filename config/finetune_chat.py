# Finetune a pretrained model on conversations, so that it answers.
#
#   data     python prepare.py chats.json --chat --tokenizer=data/DATASET_OF_THE_RUN
#            (for GPT-2: --tokenizer=gpt2; for SmolLM2: --tokenizer=hf:HuggingFaceTB/SmolLM2-135M)
#   launch   python train.py config/finetune_chat.py --dataset=chats --init_from=out
#            or --init_from=gpt2, --init_from=HuggingFaceTB/SmolLM2-135M
#   talk     python sample.py --out_dir=out-chat --chat
#   batch    16 sequences of packed conversations: with 1,024 tokens each, at most 16,384 tokens per
#            iteration; only the assistant's tokens are in the loss
#   cost     two epochs. A small model needs more of them and higher rates: docs/chat.md
#   loss     depends on the data: compare with the validation loss of the first step

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
