"""Snapshots in memory: the snapshot server of a node, and its client in each rank.

snapshot_taker             a rank copies its state into snapshot memory          (the only module with torch)
snapshot_client            a rank sends requests to its node's snapshot server
snapshot_memory            the memory that both map
snapshot_server            state and operations of the server
  attempt_snapshots        the snapshots of one attempt: when to store and when to copy them
  rank_entry               one rank's snapshots
  checkpoint_writer        stores a step as a durable checkpoint
  peer_servers             requests to the servers of other nodes
snapshot_server_process    the sockets and the lifetime of the server
server_start, server_monitor    start a server; detect one that is stopped or hung
server_socket              the unix socket between them: both ends check the user of the other
"""
