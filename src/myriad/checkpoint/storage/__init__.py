"""Where checkpoints are stored. Without torch.

storage_backends     a local folder, or a URL that fsspec opens
direct_io            local files without the page cache
verified_files       write a file and read it back
checkpoint_folder    the checkpoints of a run: commit, verify, prune
folder_owner         which run and attempt a folder belongs to
checkpoint_list      the saved states of a run, for people
staged_folder        output folders of commands, put in place by one rename
"""
