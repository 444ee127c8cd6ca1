/**
 * A binary tile: u32 length of the head (little-endian), head as JSON, then arrays, each padded to 8 bytes.
 * The arrays are views into the one buffer that came: nothing is copied.
 */

const TYPES = {
  f4: Float32Array,
  f8: Float64Array,
  i4: Int32Array,
  u4: Uint32Array,
  u2: Uint16Array,
  i2: Int16Array,
  u1: Uint8Array,
};

/**
 * @param {ArrayBuffer} buffer
 * @returns {{facts: any, arrays: Record<string, any>}}
 */
export function decodeTile(buffer) {
  const headBytes = new DataView(buffer).getUint32(0, true);
  const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headBytes)));
  /** @type {Record<string, any>} */
  const arrays = {};
  let offset = 4 + headBytes;
  for (const { name, type, length } of facts.arrays) {
    const Type = TYPES[type];
    if (!Type) throw new Error(`a tile has an array of type ${type}`);
    arrays[name] = new Type(buffer, offset, length);
    offset += Math.ceil((length * Type.BYTES_PER_ELEMENT) / 8) * 8;
  }
  return { facts, arrays };
}
