"""Framing, authentication, encryption and typed messages of the sockets between Myriad's processes.

framing          bounded frames on a byte stream                      no input or output
handshake        both ends prove a secret; keys of the connection     no input or output
frame_codes      the code of each frame                               no input or output
frame_reader     frames with their codes to bytes and back            no input or output
tls              TLS 1.3 that the handshake ties to the secret
stream_channel   all of these on asyncio streams: the driver, the doctor's first node
socket_channel   all of these on a blocking socket, with payloads and descriptors: snapshot servers
listener         a listening socket that withstands floods
message_codec    dataclasses to JSON and back
"""
